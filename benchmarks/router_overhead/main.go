// Command router_overhead is what stands on both sides of the routers in benchmarks/router_overhead.py: `engines` are mock
// engines that answer at once or at a given pace, `load` asks a router and prints what it measured as one JSON object,
// `conversations` prints what prompts begin with.
package main

import (
	"log"
	"os"
)

func main() {
	log.SetFlags(0)
	commands := map[string]func([]string) error{"engines": serveEngines, "load": runLoad, "conversations": printConversations}
	if len(os.Args) < 2 || commands[os.Args[1]] == nil {
		log.Fatal("router_overhead: expected `engines`, `load` or `conversations` as the first argument; `-h` after it lists its flags")
	}
	if err := commands[os.Args[1]](os.Args[2:]); err != nil {
		log.Fatalf("router_overhead %s: %v", os.Args[1], err)
	}
}
