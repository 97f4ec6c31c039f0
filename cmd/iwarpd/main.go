// Command iwarpd makes a network interface an RDMA NIC. It runs the data plane on the interface's
// queues and serves programs through its socket. This package has the flags, the configuration and
// the wiring; packages dataplane and ctrl do the work.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/printable"
)

// version is set by the linker.
var version = "devel"

func main() {
	// A crash ends with SIGABRT. The exit code of the Go runtime would be 2, for which systemd
	// does not restart the unit.
	debug.SetTraceback("crash")
	root, out := rootCommand(), &results{w: os.Stdout}
	root.SetOut(out)
	root.InitDefaultCompletionCmd()
	if cmd, _, err := root.Find([]string{"completion"}); err == nil && cmd != root {
		cmd.Args, cmd.RunE = noArguments, func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
		for _, shell := range cmd.Commands() {
			shell.Args = noArguments
		}
	}
	root.InitDefaultHelpCmd()
	if cmd, _, err := root.Find([]string{"help"}); err == nil && cmd != root {
		cmd.Args = func(_ *cobra.Command, args []string) error {
			about, rest, _ := root.Find(args)
			return noArguments(about, rest)
		}
	}
	cmd, err := root.ExecuteC()
	if err == nil {
		err = out.err
	}
	if err != nil {
		asJSON, _ := cmd.Flags().GetBool("json")                      // only doctor has it
		report(err, asJSON || slices.Contains(os.Args[1:], "--json")) // parsing may have ended before that flag
	}
	os.Exit(exitCode(err))
}

// report prints an error on one line, or as an object like iwarpctl's. As the log, it does not wait for a reader.
func report(err error, asJSON bool) {
	text, w := oneLine(printable.Error(err)), &lines{f: os.Stderr}
	switch {
	case asJSON:
		_ = json.NewEncoder(w).Encode(map[string]any{"error": text, "code": exitCode(err)})
	case inJournal(os.Stderr):
		fmt.Fprintln(w, priority(zapcore.ErrorLevel)+text)
	default:
		fmt.Fprintln(w, "iwarpd: "+text)
	}
}

// results is the standard output. It keeps the first write error, which cobra ignores.
type results struct {
	w   io.Writer
	err error
}

func (r *results) Write(b []byte) (int, error) {
	n, err := r.w.Write(b)
	if r.err == nil {
		r.err = err
	}
	return n, err
}

const exitCodes = `
  0  stopped by SIGTERM or SIGINT, or nothing to do
  1  other failure, or a user or group that the host does not know
  2  invalid flag, key or value, or a limit of the process that is too low
  3  the interface or queue does not exist, or has no address
  4  a capability or a permission is missing
  5  the interface, a queue, the socket or the address for metrics is in use`

func rootCommand() *cobra.Command {
	var file string
	var check bool
	cmd := &cobra.Command{
		Use:   "iwarpd --interface IF [flags]",
		Short: "RDMA (iWARP) on a plain Ethernet interface, in user space",
		Long: "iwarpd implements iWARP on network interfaces through AF_XDP, for the programs\n" +
			"that connect to its socket. The kernel keeps all other traffic of the interface.\n\n" +
			"Each flag is also a key of the file (without the dashes) and an environment\n" +
			"variable (" + envPrefix + "LOG_LEVEL for --log-level). Flags override the environment,\n" +
			"which overrides the file. A list has commas, or its flag is given several times:\n" +
			"-i eth0,eth1 or -i eth0 -i eth1.\n\n" +
			"Exit codes:" + exitCodes,
		Example: "  iwarpd --interface eth0\n" +
			"  iwarpd --config /etc/iwarpd/iwarpd.yaml --log-level debug\n" +
			"  iwarpd --config /etc/iwarpd/iwarpd.yaml --check-config",
		Version:       version,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			read := func() (*settings, error) { return load(cmd.Flags(), file) }
			if !check {
				return serve(read)
			}
			if _, err := read(); err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), "iwarpd: the configuration is valid")
			return nil
		},
	}
	cmd.SetUsageTemplate(strings.ReplaceAll(cmd.UsageTemplate(), ".FlagUsages", ".FlagUsagesWrapped 80"))
	cmd.SetVersionTemplate("iwarpd {{.Version}}\n")
	cmd.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		if wrong, ok := errors.AsType[*pflag.InvalidValueError](err); ok { // of a switch: the other flags are strings
			err = fmt.Errorf("--%s is %q: must be true or false", wrong.GetFlag().Name, wrong.GetValue())
		}
		return configErr("%w; see %s --help", err, cmd.CommandPath())
	})
	cmd.Flags().StringVarP(&file, "config", "c", "", "configuration file (YAML); also "+envPrefix+"CONFIG")
	cmd.Flags().BoolVar(&check, "check-config", false, "check flags, environment and file, and exit")
	cmd.Flags().SortFlags = false
	addFlags(cmd.Flags())
	completions(cmd)
	cmd.AddCommand(doctorCommand())
	return cmd
}

func noArguments(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return configErr("unexpected argument %q; see %s --help", args[0], cmd.CommandPath())
	}
	return nil
}

// serve runs the daemon with the settings that read returns until SIGTERM or SIGINT, and logs its start and end. SIGHUP
// makes it read its settings again.
func serve(read func() (*settings, error)) error {
	signal.Ignore(unix.SIGPIPE) // the reader of the log may end before the daemon
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	defer stop()
	late := make(chan struct{})
	hurry, hasten := context.WithCancel(context.Background())
	defer hasten()
	// A second signal ends the drain. timeout(1) and others send a signal twice at once, which counts as one.
	context.AfterFunc(ctx, func() {
		time.Sleep(time.Second)
		close(late)
		again := make(chan os.Signal, 1)
		signal.Notify(again, os.Interrupt, unix.SIGTERM)
		<-again
		hasten()
	})
	hangups := make(chan os.Signal, 1)
	signal.Notify(hangups, unix.SIGHUP)
	defer signal.Stop(hangups)
	var d *daemon
	started := make(chan error, 1)
	go func() {
		s, err := read()
		if err == nil {
			d, err = start(s)
		}
		started <- err
	}()
	select {
	case err := <-started:
		if err != nil {
			return fewFiles(err)
		}
	case <-late:
		// A name service may be slow, and the kernel may take seconds to pin the memory of queues. All that was set up
		// ends with the process, except for the files of sockets, which the next daemon replaces.
		return nil
	}
	d.hangups, d.read, d.hurry = hangups, read, hurry
	return errors.Join(d.run(ctx), d.close())
}
