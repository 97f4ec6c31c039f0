package main

import "github.com/spf13/cobra"

func (c *command) disconnect() *cobra.Command {
	var abort bool
	cmd := &cobra.Command{
		Use: "disconnect NUMBER", Short: "End the connection of a queue pair", Example: "  iwarpctl disconnect 3 --abort",
		Args: usageArgs(cobra.ExactArgs(1)), ValidArgsFunction: c.completeQP,
		RunE: func(cmd *cobra.Command, args []string) error {
			num, err := qpNumber(args[0])
			if err != nil {
				return err
			}
			dev, err := c.open(cmd.Context())
			if err != nil {
				return err
			}
			defer dev.Close()
			if err := dev.Admin().Disconnect(cmd.Context(), num, abort); err != nil || !c.json {
				return err
			}
			return c.print(map[string]any{"qp": num, "abort": abort})
		},
	}
	cmd.Flags().BoolVar(&abort, "abort", false, "reset the connection instead of finishing queued work")
	return cmd
}
