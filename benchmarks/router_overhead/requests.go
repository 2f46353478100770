package main

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"sync/atomic"
)

const (
	numConversations = 32
	textBytes        = 1 << 20
)

// requests makes bodies of one size: half of the prompt is one of a few conversations, the rest nobody has asked before.
type requests struct {
	bodyBytes, sharedBytes, uniqueBytes int
	opening, closing                    string
	text                                []byte
	asked                               atomic.Int64
}

func newRequests(bodyBytes, maxTokens, paceMilliseconds int, isStream bool) (*requests, error) {
	opening := fmt.Sprintf(`{"model":"m","stream":%t,"max_tokens":%d,"seed":%d,"messages":[{"role":"user","content":"`,
		isStream, maxTokens, paceMilliseconds)
	closing := `"}]}`
	promptBytes := bodyBytes - len(opening) - len(closing)
	if promptBytes < 2*len(stamp(0)) || promptBytes > textBytes {
		return nil, fmt.Errorf("-body is %d, of which %d are not the prompt; expected %d to %d for the prompt",
			bodyBytes, bodyBytes-promptBytes, 2*len(stamp(0)), textBytes)
	}
	return &requests{
		bodyBytes: bodyBytes, sharedBytes: promptBytes / 2, uniqueBytes: promptBytes - promptBytes/2 - len(stamp(0)),
		opening: opening, closing: closing, text: randomText(),
	}, nil
}

// next is the next request as it goes over the wire, in pieces: no prompt is copied.
func (r *requests) next(host string) net.Buffers {
	number := int(r.asked.Add(1))
	head := fmt.Sprintf("POST /v1/chat/completions HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\n"+
		"Content-Length: %d\r\n\r\n%s", host, r.bodyBytes, r.opening)
	unique := number * 7919 % (textBytes - r.uniqueBytes)
	return net.Buffers{
		[]byte(head),
		r.conversation(number),
		[]byte(stamp(number)), // what follows has been sent before, but never after this
		r.text[unique:][:r.uniqueBytes],
		[]byte(r.closing),
	}
}

// printConversations prints what prompts of bodies of one size begin with, one a line.
func printConversations(arguments []string) error {
	flags := flag.NewFlagSet("conversations", flag.ExitOnError)
	bodyBytes := flags.Int("body", 0, "bytes of a body, not streamed, of one token")
	_ = flags.Parse(arguments)
	made, err := newRequests(*bodyBytes, 1, 0, false)
	if err != nil {
		return err
	}
	for number := range numConversations {
		fmt.Printf("%s\n", made.conversation(number))
	}
	return nil
}

func (r *requests) conversation(number int) []byte {
	return r.text[number%numConversations*(textBytes-r.sharedBytes)/numConversations:][:r.sharedBytes]
}

func stamp(number int) string { return fmt.Sprintf(" %010d ", number) }

// randomText is words of lower-case letters, the same in every run.
func randomText() []byte {
	random := rand.New(rand.NewPCG(1, 2))
	text := make([]byte, textBytes)
	for i := range text {
		text[i] = "     abcdefghijklmnopqrstuvwxyz"[random.IntN(31)]
	}
	return text
}
