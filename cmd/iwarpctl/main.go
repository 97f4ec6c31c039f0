// Command iwarpctl controls iwarpd: it shows the daemon's state, and copies files, tests and
// measures by RDMA. The work is done in package app.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/internal/printable"
	"github.com/iwarpd/iwarpd/rpcrdma/nfs"
)

// version is set by the linker.
var version = "devel"

// command is the state that all subcommands share.
type command struct {
	socket    string
	device    string
	json      bool
	transport transportValue
	share     bool
	ip        struct{ DSCP, TTL, Priority int }
	out       io.Writer // results
	err       io.Writer // everything else
	self      uint32    // the client number of a query's own connection
}

func main() {
	signals := []os.Signal{os.Interrupt, unix.SIGTERM}
	if !signal.Ignored(unix.SIGHUP) { // as nohup(1) makes it
		signals = append(signals, unix.SIGHUP)
	}
	ctx, stop := signal.NotifyContext(context.Background(), signals...)
	// A second signal ends the command where it is, such as in a write that a full pipe blocks.
	// timeout(1) and others send a signal twice at once, which counts as one.
	context.AfterFunc(ctx, func() { time.AfterFunc(time.Second, stop) })
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run runs one command line and returns its exit code.
func run(ctx context.Context, args []string, out, errOut io.Writer) int {
	working, end := context.WithCancel(ctx)
	defer end()
	failed, fail := context.WithCancelCause(context.Background())
	defer fail(nil)
	results := &results{w: out, failed: func(err error) { fail(err); end() }}
	c := &command{out: results, err: errOut}
	root := c.root()
	root.SetArgs(args)
	root.SetOut(results)
	root.SetErr(errOut)
	root.InitDefaultCompletionCmd()
	if cmd, _, err := root.Find([]string{"completion"}); err == nil && cmd != root {
		cmd.Args, cmd.RunE = usageArgs(cobra.NoArgs), func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
		for _, shell := range cmd.Commands() {
			shell.Args, shell.DisableFlagsInUseLine = usageArgs(cobra.NoArgs), true
		}
	}
	root.InitDefaultHelpCmd()
	if cmd, _, err := root.Find([]string{"help"}); err == nil && cmd != root {
		cmd.Args = func(_ *cobra.Command, args []string) error {
			about, rest, _ := root.Find(args)
			return usageArgs(cobra.NoArgs)(about, rest)
		}
	}
	err := root.ExecuteContext(working)
	if cause := context.Cause(failed); cause != nil {
		err = cause
	}
	code := exitCode(ctx, err)
	if code == exitUsage && slices.Contains(args, "--json") { // parsing may have ended before that flag
		c.json = true
	}
	if err != nil && (code != exitInterrupted || errors.As(err, new(*nfs.LeftError))) {
		c.report(err, code)
	}
	return code
}

// report prints an error on one line, or as an object with --json.
func (c *command) report(err error, code int) {
	text := daemonEnded.Replace(strings.Join(strings.Fields(reason(err)), " "))
	if c.json {
		_ = encoder(c.err).Encode(map[string]any{"error": text, "code": code})
		return
	}
	fmt.Fprintln(c.err, "iwarpctl:", printable.String(text))
}

// print writes one JSON document.
func (c *command) print(v any) error {
	enc := encoder(c.out)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

func (c *command) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "iwarpctl",
		Short: "Show, try, measure and use RDMA with iwarpd",
		Long: "iwarpctl controls the iwarpd of this host, copies files, and tests RDMA.\n\n" +
			"With --json a command prints JSON: one document, or one for each sample, client\n" +
			"or file. status, qp show and the lists have the fields of the messages in\n" +
			"ctrl/iwarpd.proto. Sizes are in bytes and durations in seconds, unless the name\n" +
			"of the field has another unit. Later versions add fields, and rename or remove\n" +
			"none. An error is an object with error and code, on standard error.\n\n" +
			"Exit codes:" + exitCodes,
		Example: "  iwarpctl status\n" +
			"  iwarpctl ping -c -a 10.0.0.2 -C 10 -V\n" +
			"  iwarpctl serve --dir /srv/files --listen 10.0.0.1:7176\n" +
			"  iwarpctl cp big.tar 10.0.0.1:",
		Version:       version,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          usageArgs(cobra.NoArgs),
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetUsageTemplate(strings.ReplaceAll(root.UsageTemplate(), ".FlagUsages", ".FlagUsagesWrapped 80"))
	root.SetVersionTemplate("iwarpctl {{.Version}}\n")
	root.PersistentFlags().StringVar(&c.socket, "socket", "", "socket of the daemon (default "+iwarp.DefaultSocket+", or $IWARPD_SOCKET)")
	root.PersistentFlags().StringVar(&c.device, "device", "", "interface of the daemon for connections and listeners (default: that of the route, and all)")
	root.PersistentFlags().BoolVar(&c.json, "json", false, "print JSON")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usageError{fmt.Errorf("%w; see %s --help", flagError(err), cmd.CommandPath())}
	})
	root.AddCommand(c.status())
	for _, cmd := range []*cobra.Command{c.ping(), c.serve(), c.cp(), c.perf()} {
		root.AddCommand(c.addTransport(cmd))
	}
	root.AddCommand(c.nfs(), c.doctor())
	root.AddCommand(c.lists()...)
	completesBy(root, "device", c.fromDaemon(interfaceNames))
	decimals(root)
	completeFiles(root)
	return root
}

// decimals makes the numbers in flags of cmd and its subcommands decimal.
func decimals(cmd *cobra.Command) {
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if f.Value.Type() == "int" {
			f.Value = decimal{f.Value}
		}
	})
	for _, sub := range cmd.Commands() {
		decimals(sub)
	}
}

// decimal is the value of a flag that is a number. Package pflag alone takes 010, as a loop over seq -w writes 10, for 8.
type decimal struct{ pflag.Value }

func (d decimal) Set(s string) error {
	n, err := strconv.Atoi(s)
	if err != nil {
		return err
	}
	return d.Value.Set(strconv.Itoa(n))
}

// flagError rewords the errors of wrong values, in which package flag names functions of Go, and explains how to write the
// name of a file that looks like a flag.
func flagError(err error) error {
	if unknown, ok := errors.AsType[*pflag.NotExistError](err); ok {
		name := "--" + unknown.GetSpecifiedName()
		if short := unknown.GetSpecifiedShortnames(); short != "" {
			name = "-" + short
		}
		if _, e := os.Lstat(name); e == nil {
			return fmt.Errorf("%w: write ./%s for the file of that name", err, name)
		}
	}
	wrong, ok := errors.AsType[*pflag.InvalidValueError](err)
	if !ok {
		return err
	}
	kind := wrong.GetFlag().Value.Type()
	want, ok := map[string]string{
		"bool": "true or false", "int": "a whole number", "duration": "a number with a unit, such as 10s or 500ms",
	}[kind]
	if !ok { // a type of this package, whose errors begin with the value
		return fmt.Errorf("--%s %w", wrong.GetFlag().Name, wrong.Unwrap())
	}
	small, _ := time.ParseDuration(digits.ReplaceAllString(wrong.GetValue(), "1"))
	if errors.Is(err, strconv.ErrRange) || kind == "duration" && small != 0 {
		return fmt.Errorf("--%s %q: is out of range", wrong.GetFlag().Name, wrong.GetValue())
	}
	return fmt.Errorf("--%s %q: must be %s", wrong.GetFlag().Name, wrong.GetValue(), want)
}

// digits matches the numbers in a duration. If it is valid with smaller ones, it is too long.
var digits = regexp.MustCompile(`[0-9]+`)

// usageArgs turns a wrong number of arguments into a usage error that names the expected arguments.
func usageArgs(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		err := check(cmd, args)
		switch {
		case err == nil:
			return nil
		case cmd.HasAvailableSubCommands():
			mean := ""
			cmd.SuggestionsMinimumDistance = 2
			if s := cmd.SuggestionsFor(args[0]); args[0] != "" && len(s) > 0 { // each name begins with ""
				mean = " (did you mean " + strings.Join(s, " or ") + "?)"
			}
			return usageError{fmt.Errorf("%s has no command %q%s; see %s --help", cmd.CommandPath(), args[0], mean, cmd.CommandPath())}
		}
		return usageError{fmt.Errorf("%q: write it as %s; see %s --help", strings.Join(append([]string{cmd.CommandPath()}, args...), " "), cmd.UseLine(), cmd.CommandPath())}
	}
}

// daemonPatience is how long to wait for the daemon to accept a client.
var daemonPatience = 15 * time.Second

// open connects to the daemon.
func (c *command) open(ctx context.Context) (*iwarp.Device, error) {
	limited, cancel := context.WithTimeout(ctx, daemonPatience)
	defer cancel()
	dev, err := iwarp.Open(limited, c.socket)
	if err != nil {
		return nil, &daemonError{c.socketPath(), err}
	}
	if err := dev.Use(c.device); err != nil {
		dev.Close()
		return nil, usageError{err}
	}
	return dev, nil
}

// outlive makes a server go on when the reader of its messages has ended. Go ends a program by SIGPIPE that writes to a
// broken pipe on standard error, which systemd takes for a clean exit.
func outlive() { signal.Ignore(unix.SIGPIPE) }

// serveAt connects to the daemon, listens at addr, and runs serve until it returns. With restart it
// waits for a new daemon if the connection is lost, and runs serve again.
func (c *command) serveAt(ctx context.Context, addr string, cfg *iwarp.Config, restart bool, serve func(*iwarp.Device, *iwarp.Listener) error) error {
	outlive()
	if r, ok := c.out.(*results); ok && restart {
		c.out = r.w // a line that is lost, as on a full disk, concerns one client, and must not end the others
	}
	dev, err := c.open(ctx)
	for err == nil {
		err = c.serveBy(ctx, dev, addr, cfg, serve)
		if ctx.Err() != nil || !restart || !errors.Is(err, iwarp.ErrDaemonGone) {
			return err
		}
		fmt.Fprintf(c.err, "the daemon at %s is gone: waiting for the next one\n", c.socketPath())
		if dev, err = iwarp.OpenWait(ctx, c.socket); err != nil {
			err = &daemonError{c.socketPath(), err}
		}
	}
	if ctx.Err() != nil {
		return nil // interrupted while waiting
	}
	return err
}

func (c *command) serveBy(ctx context.Context, dev *iwarp.Device, addr string, cfg *iwarp.Config, serve func(*iwarp.Device, *iwarp.Listener) error) error {
	defer dev.Close()
	if err := dev.Use(c.device); err != nil {
		return usageError{err}
	}
	l, err := dev.Listen(ctx, addr, c.over(cfg))
	if err != nil {
		return listenFailed(err)
	}
	defer l.Close()
	fmt.Fprintf(c.err, "listening on %s\n", l.Addr())
	return serve(dev, l)
}

func (c *command) socketPath() string {
	return cmp.Or(c.socket, os.Getenv("IWARPD_SOCKET"), iwarp.DefaultSocket)
}

// daemonError means that the daemon could not be reached.
type daemonError struct {
	socket string
	err    error
}

func (e *daemonError) Unwrap() error { return e.err }

func (e *daemonError) Error() string {
	switch {
	case errors.Is(e.err, context.DeadlineExceeded), errors.Is(e.err, unix.EAGAIN): // EAGAIN: many clients wait already
		return fmt.Sprintf("iwarpd at %s does not answer: is it still starting, its process stopped, or the host overloaded? (systemctl status iwarpd)", e.socket)
	case errors.Is(e.err, unix.ENOENT), errors.Is(e.err, unix.ECONNREFUSED):
		return fmt.Sprintf("no iwarpd at %s: start it, or name its socket with --socket", e.socket)
	case errors.Is(e.err, unix.EACCES), errors.Is(e.err, unix.EPERM):
		return fmt.Sprintf("no permission to use %s: join the group that owns it, or run as root", e.socket)
	case errors.Is(e.err, unix.ENOTSOCK):
		return fmt.Sprintf("%s is not a socket: name the socket of iwarpd with --socket", e.socket)
	case errors.Is(e.err, unix.EPROTOTYPE):
		return fmt.Sprintf("%s is the socket of another program: name that of iwarpd with --socket", e.socket)
	case errors.Is(e.err, unix.ENAMETOOLONG):
		return fmt.Sprintf("the path of a socket has at most 107 bytes: %s has %d", e.socket, len(e.socket))
	}
	return fmt.Sprintf("iwarpd at %s: %v", e.socket, e.err)
}
