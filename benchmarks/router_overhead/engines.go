package main

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

// What routers ask of a worker before they trust it. The model is called m.
var facts = map[string]string{
	"/health":          `{"status":"ok"}`,
	"/ready":           `{"status":"ready"}`,
	"/v1/models":       `{"object":"list","data":[{"id":"m","object":"model","created":1,"owned_by":"mock"}]}`,
	"/model_info":      `{"model_path":"m","served_model_name":"m","is_generation":true}`,
	"/get_model_info":  `{"model_path":"m","served_model_name":"m","is_generation":true}`,
	"/server_info":     `{"model_path":"m","served_model_name":"m","version":"0"}`,
	"/get_server_info": `{"model_path":"m","served_model_name":"m","version":"0"}`,
}

const (
	completion = `{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,` +
		`"message":{"role":"assistant","content":"0 %d"},"finish_reason":"stop"}]}`
	// The content is the chunk's number and when it was sent, in nanoseconds: the client checks one, and times the other.
	chunk = "data: " + `{"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,` +
		`"delta":{"content":"%d %d"},"finish_reason":null}]}` + "\n\n"
	done = "data: [DONE]\n\n"
)

var keepsJournals bool

var bodies = sync.Pool{New: func() any { return new(bytes.Buffer) }}

// serveEngines serves until it is killed.
func serveEngines(arguments []string) error {
	flags := flag.NewFlagSet("engines", flag.ExitOnError)
	ports := flags.String("ports", "", "a port for each engine, parted by commas")
	tokenizer := flags.String("tokenizer", "", "what to answer to GET /tokenizer: engines of ours, which keep journals")
	_ = flags.Parse(arguments)
	engine := http.NewServeMux()
	keepsJournals = *tokenizer != ""
	if keepsJournals {
		card, err := os.ReadFile(*tokenizer)
		if err != nil {
			return err
		}
		engine.HandleFunc("GET /tokenizer", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, string(card)) })
	}
	for path, fact := range facts {
		engine.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, fact) })
	}
	engine.HandleFunc("POST /v1/chat/completions", complete)
	for port := range strings.SplitSeq(*ports, ",") {
		listener, err := net.Listen("tcp", "127.0.0.1:"+port)
		if err != nil {
			return err
		}
		go func() { log.Fatal(http.Serve(listener, engine)) }()
	}
	select {}
}

// complete makes `max_tokens` tokens, `seed` milliseconds apart: fields of the API that every router passes on, though
// sglang-router gives the first its newer name.
func complete(w http.ResponseWriter, r *http.Request) {
	body := bodies.Get().(*bytes.Buffer)
	body.Reset()
	_, err := body.ReadFrom(r.Body)
	count := max(integer(body.Bytes(), "max_tokens"), integer(body.Bytes(), "max_completion_tokens"))
	pace := integer(body.Bytes(), "seed")
	isStream := bytes.HasPrefix(value(body.Bytes(), "stream"), []byte("true"))
	bodies.Put(body)
	switch {
	case err != nil:
		http.Error(w, err.Error(), http.StatusBadRequest)
	case isStream:
		stream(w, count, time.Duration(pace)*time.Millisecond, keepsJournals && r.Header.Get("X-Kvasir-Resumable") != "")
	default:
		time.Sleep(time.Duration(count*pace) * time.Millisecond)
		writeJSON(w, fmt.Sprintf(completion, time.Now().UnixNano()))
	}
}

func stream(w http.ResponseWriter, count int, pace time.Duration, hasJournal bool) {
	w.Header().Set("Content-Type", "text/event-stream")
	if hasJournal {
		w.Header().Set("X-Kvasir-Resumable", "1")
	}
	flusher := http.NewResponseController(w)
	for number := range count {
		time.Sleep(pace)
		if hasJournal {
			fmt.Fprintf(w, ": kvasir [%d,[%d]]\n", number, number)
		}
		fmt.Fprintf(w, chunk, number, time.Now().UnixNano())
		if flusher.Flush() != nil {
			return // the client is gone
		}
	}
	_, _ = io.WriteString(w, done)
}

func writeJSON(w http.ResponseWriter, text string) {
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, text)
}

// value is what follows a member's name in a JSON text. Routers may write members in another order and with spaces; no
// prompt of ours holds a quotation mark.
func value(body []byte, name string) []byte {
	_, after, _ := bytes.Cut(body, []byte(`"`+name+`":`))
	return bytes.TrimLeft(after, " ")
}

// integer is 0 where the member is absent.
func integer(body []byte, name string) int {
	digits := value(body, name)
	end := bytes.IndexFunc(digits, func(r rune) bool { return r < '0' || r > '9' })
	number, _ := strconv.Atoi(string(digits[:max(end, 0)]))
	return number
}
