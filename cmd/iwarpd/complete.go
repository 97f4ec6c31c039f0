package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/iwarpd/iwarpd/dataplane/xsk/hostcheck"
)

// completions makes shells complete the values of the flags of cmd: by words, interfaces or files.
func completions(cmd *cobra.Command) {
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		// Fails only if the flag does not exist.
		_ = cmd.RegisterFlagCompletionFunc(f.Name, func(*cobra.Command, []string, string) ([]cobra.Completion, cobra.ShellCompDirective) {
			switch f.Name {
			case "config", "socket":
				return nil, cobra.ShellCompDirectiveDefault
			case "interface", "interfaces":
				names, _ := hostcheck.Interfaces()
				return names, cobra.ShellCompDirectiveNoFileComp
			}
			return words(f.Name), cobra.ShellCompDirectiveNoFileComp
		})
	})
}

// words returns the words of which the key with that name must be one, which its error lists, or nil.
func words(name string) []string {
	i := slices.IndexFunc(keys, func(k key) bool { return k.name == name })
	if i < 0 {
		return nil
	}
	list, ok := strings.CutPrefix(fmt.Sprint(keys[i].set(new(settings), "?")), "must be one of ")
	if !ok {
		return nil
	}
	return strings.Split(list, ", ")
}
