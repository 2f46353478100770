//go:build nodes

package main

import (
	"context"
	"maps"

	"github.com/spf13/cobra"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func init() {
	maps.Copy(programs, map[string]func() int{
		"kube-proxy":     run(proxy.NewProxyCommand),
		"kube-scheduler": run(func() *cobra.Command { return scheduler.NewSchedulerCommand() }),
		"kubelet":        run(func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) }),
	})
}
