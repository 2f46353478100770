// Command cluster is every program of the test cluster, helm too, in one binary: linked once, they share most of their
// code, so one build replaces a dozen. It runs the program that it is called as, or the one that its first argument
// names; without either it prints the names that it knows. Those that a cluster with nodes needs besides are in
// nodes.go.
package main

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.etcd.io/etcd/server/v3/etcdmain"
	helm "helm.sh/helm/v4/pkg/cmd"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"          // --logging-format=json
	_ "k8s.io/component-base/metrics/prometheus/clientgo" // client metrics on /metrics
	_ "k8s.io/component-base/metrics/prometheus/version"  // kubernetes_build_info
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
)

// Each builder is called only when its program was chosen: they register flags in the same global set.
var programs = map[string]func() int{
	"etcd":                    func() int { etcdmain.Main(os.Args); return 0 },
	"helm":                    runHelm,
	"kube-apiserver":          run(apiserver.NewAPIServerCommand),
	"kube-controller-manager": run(controllers.NewControllerManagerCommand),
	"kubectl":                 run(kubectl.NewDefaultKubectlCommand),
}

func run(build func() *cobra.Command) func() int {
	return func() int { return cli.Run(build()) }
}

// Not by cli.Run, and with no flags from outside: those that Kubernetes' packages register for all would become helm's.
func runHelm() int {
	pflag.CommandLine = pflag.NewFlagSet("helm", pflag.ExitOnError)
	command, err := helm.NewRootCmd(os.Stdout, os.Args[1:], helm.SetupLogging)
	if err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		return 1
	}
	if command.Execute() != nil { // it has printed the error
		return 1
	}
	return 0
}

func main() {
	if _, known := programs[filepath.Base(os.Args[0])]; !known {
		os.Args = os.Args[1:]
	}
	names := slices.Sorted(maps.Keys(programs))
	if len(os.Args) == 0 {
		fmt.Println(strings.Join(names, "\n"))
		return
	}
	program, known := programs[filepath.Base(os.Args[0])]
	if !known {
		fmt.Fprintf(os.Stderr, "cluster: no program is named %q: name one of %s\n", os.Args[0], strings.Join(names, ", "))
		os.Exit(2)
	}
	os.Exit(program())
}
