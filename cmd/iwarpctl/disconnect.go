package main

import (
	"context"

	"github.com/spf13/cobra"

	iwarp "github.com/iwarpd/iwarpd/client"
)

// disconnect implements "iwarpctl disconnect", and "iwarpctl qp close", its older name.
func (c *command) disconnect(use, example string) *cobra.Command {
	var abort bool
	cmd := &cobra.Command{
		Use: use + " NUMBER", Short: "End the connection of a queue pair", Example: example,
		Args: usageArgs(cobra.ExactArgs(1)), ValidArgsFunction: c.completeQP,
		RunE: func(cmd *cobra.Command, args []string) error {
			num, err := qpNumber(args[0])
			if err != nil {
				return err
			}
			ask := func(a *iwarp.Admin, ctx context.Context) (struct{}, error) {
				return struct{}{}, a.Disconnect(ctx, num, abort)
			}
			return query(c, ask, func(struct{}) error {
				if c.json {
					return c.print(map[string]any{"qp": num, "abort": abort})
				}
				return nil
			})(cmd, nil)
		},
	}
	cmd.Flags().BoolVar(&abort, "abort", false, "reset the connection instead of finishing queued work")
	return cmd
}
