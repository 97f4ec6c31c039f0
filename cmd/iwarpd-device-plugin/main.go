// Command iwarpd-device-plugin gives pods of Kubernetes access to the iwarpd of
// their node. It advertises the resource iwarpd.io/rdma to the kubelet. A
// container that asks for one gets the folder of one socket of the daemon, and
// the libraries for unmodified RDMA programs, by CDI.
//
// Each unit of the resource is a slot: a folder below -slots with a socket
// that the daemon opens there (key "slots" of iwarpd.yaml), with its own
// quotas and without administrator's rights.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	iwarp "github.com/iwarpd/iwarpd/client"
)

// version is set by the linker.
var version = "devel"

func main() {
	c, text, err := parse(os.Args[1:])
	code := 2
	if err == nil {
		code = 1
		if text != "" {
			_, err = fmt.Println(text)
		} else {
			ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
			err = run(ctx, c, slog.New(slog.NewTextHandler(os.Stderr, nil)))
			stop()
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "iwarpd-device-plugin:", err)
		os.Exit(code)
	}
}

// parse returns the configuration that the flags make, or the text that they ask for.
func parse(args []string) (c config, text string, err error) {
	var socket string
	var out strings.Builder
	f := flag.NewFlagSet("iwarpd-device-plugin", flag.ContinueOnError)
	f.SetOutput(&out)
	f.StringVar(&c.Resource, "resource", "iwarpd.io/rdma", "name of the resource")
	f.StringVar(&c.Slots, "slots", "/run/iwarpd/slots", "folder of the daemon's sockets for containers, SLOTS/NAME/iwarpd.sock; each is one unit")
	f.StringVar(&socket, "socket", iwarp.DefaultSocket, "socket of the daemon; its health is the health of the units")
	f.StringVar(&c.Libraries, "libraries", "/usr/lib/iwarpd", "folder of the libraries for unmodified RDMA programs; empty: none")
	f.StringVar(&c.Kubelet, "kubelet", filepath.Clean(v1beta1.DevicePluginPath), "folder of the kubelet's device plugins")
	f.StringVar(&c.CDI, "cdi", "/var/run/cdi", "folder of CDI files; containerd, CRI-O and podman read it")
	c.Period = 2 * time.Second
	f.Func("period", "interval at which to check the daemon (default 2s)", func(v string) (err error) {
		if c.Period, err = time.ParseDuration(v); err != nil {
			return errors.New("must be a time with a unit, such as 2s")
		}
		return nil
	})
	about := f.Bool("version", false, "print the version")
	f.Usage = func() {
		fmt.Fprintln(&out, "Usage: iwarpd-device-plugin [flags]\n\nGives pods access to the iwarpd of their node, as the resource iwarpd.io/rdma.\n\nFlags:")
		f.PrintDefaults()
	}
	switch err := f.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return c, strings.TrimSuffix(out.String(), "\n"), nil
	case err != nil:
		return c, "", fmt.Errorf("%w; see -help", err)
	case *about:
		return c, "iwarpd-device-plugin " + version, nil
	case f.NArg() > 0:
		return c, "", fmt.Errorf("unexpected argument %q; see -help", f.Arg(0))
	}
	c.Alive = func(ctx context.Context) error { return ask(ctx, socket) }
	return c, "", c.check()
}

// ask returns nil if the daemon answers on socket, even if it refuses the plugin because its user has as many clients as it may.
func ask(ctx context.Context, socket string) error {
	dev, err := iwarp.Open(ctx, socket)
	if errors.Is(err, iwarp.ErrQuota) {
		return nil
	}
	if err != nil {
		return err
	}
	defer dev.Close()
	_, err = dev.Admin().Status(ctx)
	return err
}
