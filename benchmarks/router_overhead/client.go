package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"
)

const answerLimit = 60 * time.Second

// client holds one keep-alive connection, made when it is needed and anew after an error.
type client struct {
	host       string
	numChunks  int // of a stream; 0: answers come in one piece
	connection net.Conn
	reader     *bufio.Reader
}

// answer is one exchange: when its first content came, and how long each chunk took from engine to client.
type answer struct {
	first  time.Duration
	delays []time.Duration
}

func (c *client) ask(request net.Buffers) (answer, error) {
	found, isReusable, err := c.exchange(request)
	if c.connection != nil && (err != nil || !isReusable) {
		c.connection.Close()
		c.connection = nil
	}
	return found, err
}

func (c *client) exchange(request net.Buffers) (found answer, isReusable bool, err error) {
	begin := time.Now()
	if err = c.connect(); err != nil {
		return
	}
	if _, err = request.WriteTo(c.connection); err != nil {
		return
	}
	response, err := http.ReadResponse(c.reader, nil)
	if err != nil {
		return
	}
	if response.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(response.Body, 200))
		return found, false, fmt.Errorf("status %d: %s", response.StatusCode, text)
	}
	if c.numChunks > 0 {
		found, err = readEvents(response.Body, c.numChunks, begin)
	} else {
		found, err = readWhole(response.Body, begin)
	}
	return found, !response.Close, err
}

func (c *client) connect() (err error) {
	if c.connection == nil {
		if c.connection, err = net.Dial("tcp", c.host); err != nil {
			c.connection = nil
			return err
		}
		c.reader = bufio.NewReaderSize(c.connection, 4096)
	}
	return c.connection.SetDeadline(time.Now().Add(answerLimit))
}

func readWhole(body io.Reader, begin time.Time) (answer, error) {
	text, err := io.ReadAll(body)
	if err == nil && !bytes.Contains(text, []byte(`"content":"0 `)) {
		err = fmt.Errorf("expected a completion, got %.200q", text)
	}
	return answer{first: time.Since(begin)}, err
}

// readEvents checks that every chunk of a stream comes once and in order, and that it ends as streams end.
func readEvents(body io.Reader, numChunks int, begin time.Time) (answer, error) {
	var found answer
	isDone := false
	lines := bufio.NewScanner(body)
	for lines.Scan() {
		line, now := lines.Bytes(), time.Now()
		if len(line) == 0 {
			continue
		}
		if !isDone && bytes.Equal(line, []byte("data: [DONE]")) {
			isDone = true
			continue
		}
		number, sent, err := readChunk(line)
		if err != nil || number != len(found.delays) || isDone {
			return found, fmt.Errorf("expected chunk %d (at its end: %t), got %.200q", len(found.delays), isDone, line)
		}
		if number == 0 {
			found.first = now.Sub(begin)
		}
		found.delays = append(found.delays, now.Sub(sent))
	}
	if err := lines.Err(); err != nil {
		return found, err
	}
	if !isDone || len(found.delays) != numChunks {
		return found, fmt.Errorf("expected %d chunks and [DONE], got %d, [DONE]: %t", numChunks, len(found.delays), isDone)
	}
	return found, nil
}

// readChunk gives the number that the engine has put into a chunk, and when it was sent.
func readChunk(line []byte) (number int, sent time.Time, err error) {
	_, content, _ := bytes.Cut(line, []byte(`"content":"`))
	content, _, _ = bytes.Cut(content, []byte(`"`))
	first, second, _ := bytes.Cut(content, []byte(" "))
	if number, err = strconv.Atoi(string(first)); err != nil {
		return
	}
	nanoseconds, err := strconv.ParseInt(string(second), 10, 64)
	return number, time.Unix(0, nanoseconds), err
}
