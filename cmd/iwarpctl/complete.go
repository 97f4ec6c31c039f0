package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"
)

// completes makes words the completions of a flag of cmd.
func completes(cmd *cobra.Command, flag string, words ...string) {
	// Fails only if the flag does not exist.
	_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp))
}

// completeQP completes queue pair numbers, with their connections as descriptions.
func (c *command) completeQP(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx := cmd.Context()
	if ctx == nil {
		ctx = context.Background()
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second) // a shell waits
	defer cancel()
	dev, err := c.open(ctx)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	defer dev.Close()
	qps, err := dev.Admin().QPs(ctx)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var out []cobra.Completion
	for _, q := range qps {
		what := q.State
		if q.Remote != "" {
			what += " " + q.Remote
		}
		out = append(out, cobra.CompletionWithDesc(fmt.Sprint(q.Qp), what))
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}
