package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	iwarp "github.com/iwarpd/iwarpd/client"
)

// completes makes words the completions of a flag of cmd.
func completes(cmd *cobra.Command, flag string, words ...string) {
	completesBy(cmd, flag, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp))
}

func completesBy(cmd *cobra.Command, flag string, f cobra.CompletionFunc) {
	// Fails only if the flag does not exist, or has completions.
	_ = cmd.RegisterFlagCompletionFunc(flag, f)
}

// completeFiles makes shells complete the names of files only where cmd and its subcommands take one.
func completeFiles(cmd *cobra.Command) {
	cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
		switch f.Name {
		case "socket", "write", "key-file":
		case "dir":
			completesBy(cmd, f.Name, folders)
		default:
			completes(cmd, f.Name)
		}
	})
	switch {
	case cmd.HasSubCommands(), cmd.ValidArgs != nil, cmd.ValidArgsFunction != nil, cmd.Name() == "cp", cmd.Name() == "get", cmd.Name() == "put":
	case cmd.Name() == "export":
		cmd.ValidArgsFunction = folders
	default:
		cmd.ValidArgsFunction = cobra.NoFileCompletions
	}
	for _, sub := range cmd.Commands() {
		completeFiles(sub)
	}
}

func folders(*cobra.Command, []string, string) ([]cobra.Completion, cobra.ShellCompDirective) {
	return nil, cobra.ShellCompDirectiveFilterDirs
}

// fromDaemon returns a function that completes by what list returns of the daemon.
func (c *command) fromDaemon(list func(context.Context, *iwarp.Device) []cobra.Completion) cobra.CompletionFunc {
	return func(cmd *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
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
		return list(ctx, dev), cobra.ShellCompDirectiveNoFileComp
	}
}

// completeQP completes queue pair numbers, with their connections as descriptions.
func (c *command) completeQP(cmd *cobra.Command, args []string, typed string) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return c.fromDaemon(queuePairs)(cmd, args, typed)
}

func queuePairs(ctx context.Context, dev *iwarp.Device) (out []cobra.Completion) {
	qps, _ := dev.Admin().QPs(ctx)
	for _, q := range qps {
		what := q.State
		if q.Remote != "" {
			what += " " + q.Remote
		}
		out = append(out, cobra.CompletionWithDesc(fmt.Sprint(q.Qp), what))
	}
	return out
}

func interfaceNames(_ context.Context, dev *iwarp.Device) (out []cobra.Completion) {
	for _, a := range dev.Interfaces() {
		out = append(out, a.Interface)
	}
	return out
}

func addresses(_ context.Context, dev *iwarp.Device) (out []cobra.Completion) {
	for _, i := range dev.Interfaces() {
		for _, a := range i.Addrs {
			out = append(out, cobra.CompletionWithDesc(a.String(), i.Interface))
		}
	}
	return out
}
