package main

import (
	"encoding/json"
	"flag"
	"net/url"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"
)

// schedule says when a connection asks.
type schedule struct {
	start, timed, end time.Time     // what is asked before `timed` warms up
	interval          time.Duration // 0: as soon as the answer before is there
}

// tally is what one connection saw, and in the end what all saw.
type tally struct {
	requests, chunks, errors int
	firstError               string
	latencies, delays        []time.Duration // of what was asked after the warm-up
}

type quantiles struct {
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
}

type report struct {
	Seconds    float64    `json:"seconds"`
	Requests   int        `json:"requests"`
	Chunks     int        `json:"chunks"`
	Errors     int        `json:"errors"`
	FirstError string     `json:"first_error"`
	Latency    *quantiles `json:"latency_ms"`     // to the first chunk of a stream, else to the answer's end
	ChunkDelay *quantiles `json:"chunk_delay_ms"` // from engine to client
}

// runLoad keeps every connection busy and prints a report as JSON.
func runLoad(arguments []string) error {
	flags := flag.NewFlagSet("load", flag.ExitOnError)
	targets := flags.String("urls", "", "base URLs, parted by commas; connections take them in turn")
	connections := flags.Int("connections", 1, "connections open at once")
	seconds := flags.Float64("seconds", 5, "how long requests begin; those begun are waited for")
	rate := flags.Float64("rate", 0, "requests a second of all connections together; 0: as many as are answered")
	bodyBytes := flags.Int("body", 200, "bytes of a request's body")
	maxTokens := flags.Int("tokens", 1, "tokens of an answer")
	pace := flags.Int("pace", 0, "milliseconds that an engine takes for a token")
	isStream := flags.Bool("stream", false, "answers come as server-sent events")
	_ = flags.Parse(arguments)
	debug.SetGCPercent(400)

	asked, err := newRequests(*bodyBytes, *maxTokens, *pace, *isStream)
	if err != nil {
		return err
	}
	hosts, err := hostsOf(*targets)
	if err != nil {
		return err
	}
	numChunks := 0
	if *isStream {
		numChunks = *maxTokens
	}
	length := time.Duration(*seconds * float64(time.Second))
	spread := min(time.Duration(*maxTokens**pace)*time.Millisecond, time.Second) // connections begin over so long
	interval := time.Duration(0)
	if *rate > 0 {
		interval = time.Duration(float64(*connections) / *rate * float64(time.Second))
		spread = interval
	}
	begin := time.Now()
	tallies := make([]tally, *connections)
	var group sync.WaitGroup
	for i := range tallies {
		start := begin.Add(spread * time.Duration(i) / time.Duration(len(tallies)))
		when := schedule{start: start, timed: begin.Add(length / 10), end: begin.Add(length), interval: interval}
		asking := &client{host: hosts[i%len(hosts)], numChunks: numChunks}
		group.Go(func() { tallies[i] = repeat(asking, asked, when) })
	}
	group.Wait()
	return json.NewEncoder(os.Stdout).Encode(reportOf(total(tallies), time.Since(begin)))
}

func hostsOf(urls string) ([]string, error) {
	var hosts []string
	for base := range strings.SplitSeq(urls, ",") {
		parsed, err := url.Parse(base)
		if err != nil {
			return nil, err
		}
		hosts = append(hosts, parsed.Host)
	}
	return hosts, nil
}

// repeat asks over one connection until the schedule's end.
func repeat(asking *client, asked *requests, when schedule) tally {
	var seen tally
	time.Sleep(time.Until(when.start))
	for next := when.start; time.Now().Before(when.end); {
		isTimed := !time.Now().Before(when.timed)
		found, err := asking.ask(asked.next(asking.host))
		seen.add(found, err, isTimed)
		if err != nil {
			time.Sleep(10 * time.Millisecond) // a router that refuses is not hammered
		}
		next = next.Add(when.interval)
		time.Sleep(time.Until(next))
	}
	return seen
}

func (t *tally) add(found answer, err error, isTimed bool) {
	t.requests++
	t.chunks += len(found.delays)
	if err != nil {
		t.errors++
		if t.firstError == "" {
			t.firstError = err.Error()
		}
	} else if isTimed {
		t.latencies = append(t.latencies, found.first)
		t.delays = append(t.delays, found.delays...)
	}
}

func total(tallies []tally) tally {
	var all tally
	for _, one := range tallies {
		all.requests += one.requests
		all.chunks += one.chunks
		all.errors += one.errors
		if all.firstError == "" {
			all.firstError = one.firstError
		}
		all.latencies = append(all.latencies, one.latencies...)
		all.delays = append(all.delays, one.delays...)
	}
	return all
}

func reportOf(all tally, took time.Duration) report {
	return report{
		Seconds: took.Seconds(), Requests: all.requests, Chunks: all.chunks, Errors: all.errors,
		FirstError: all.firstError, Latency: quantilesOf(all.latencies), ChunkDelay: quantilesOf(all.delays),
	}
}

// quantilesOf is in milliseconds; nil where nothing was timed.
func quantilesOf(times []time.Duration) *quantiles {
	if len(times) == 0 {
		return nil
	}
	slices.Sort(times)
	at := func(share float64) float64 { return times[int(share*float64(len(times)-1))].Seconds() * 1000 }
	return &quantiles{P50: at(0.5), P99: at(0.99)}
}
