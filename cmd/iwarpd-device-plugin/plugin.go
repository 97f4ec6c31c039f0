package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/iwarpd/iwarpd/internal/printable"
)

// config is the configuration of the plugin.
type config struct {
	Resource  string // domain/name
	Slots     string // folder with a folder for each unit
	Libraries string // folder mounted read-only into containers; "": none
	Kubelet   string // folder of kubelet.sock and of the plugin's own socket
	CDI       string // folder of CDI files
	Period    time.Duration

	Alive func(context.Context) error // returns nil if the daemon answers
}

// resources are the names that the kubelet takes: a domain and a name.
var resources = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$`)

// check returns an error if the kubelet would refuse the configuration.
func (c *config) check() error {
	if !resources.MatchString(c.Resource) {
		return fmt.Errorf("-resource %q: must be DOMAIN/NAME, such as iwarpd.io/rdma", c.Resource)
	}
	if c.Period <= 0 {
		return fmt.Errorf("-period %v: must be more than 0, such as 2s", c.Period)
	}
	for _, f := range []struct{ flag, folder string }{{"slots", c.Slots}, {"kubelet", c.Kubelet}, {"cdi", c.CDI}} {
		if !filepath.IsAbs(f.folder) {
			return fmt.Errorf("-%s %q: must be the absolute path of a folder", f.flag, f.folder)
		}
	}
	if c.Libraries != "" && !filepath.IsAbs(c.Libraries) {
		return fmt.Errorf("-libraries %q: must be the absolute path of a folder, or empty", c.Libraries)
	}
	return nil
}

// answerTime bounds each request to the daemon and each call to the kubelet.
const answerTime = 5 * time.Second

// file returns the name of the resource for files: a node can have plugins of several resources.
func (c *config) file() string { return strings.ReplaceAll(c.Resource, "/", "-") }

// endpoint returns the file name of the plugin's socket.
func (c *config) endpoint() string { return c.file() + ".sock" }

// plugin is the state shared by the kubelet's streams.
type plugin struct {
	v1beta1.UnimplementedDevicePluginServer
	config
	log *slog.Logger

	mu      sync.Mutex
	devices []*v1beta1.Device // replaced as a whole, never modified
	changed chan struct{}     // closed when devices is replaced
}

// run serves the kubelet until ctx is done. A restarting kubelet removes the sockets in its folder,
// so run registers again when its socket is gone.
func run(ctx context.Context, c config, log *slog.Logger) error {
	p := &plugin{config: c, log: log, changed: make(chan struct{})}
	if err := p.look(ctx); err != nil {
		return err
	}
	unreached := repeated{log: log, text: "the kubelet is not reached; trying again"}
	for ctx.Err() == nil {
		err := p.serve(ctx)
		unreached.warn(time.Now(), err)
		if err != nil {
			pause(ctx, c.Period)
		}
	}
	return nil
}

// A repeated logs the error of something that is tried again and again.
type repeated struct {
	log  *slog.Logger
	text string
	last string // the error that was logged last; "" after a success
	at   time.Time
}

// remindEvery is how often an error that lasts is logged.
const remindEvery = 10 * time.Minute

// warn logs err at the time now, unless it is nil, or is the same as before and was logged within remindEvery.
func (r *repeated) warn(now time.Time, err error) {
	if err == nil {
		r.last = ""
		return
	}
	if text := err.Error(); text != r.last || now.Sub(r.at) >= remindEvery {
		r.last, r.at = text, now
		r.log.Warn(r.text, "error", err)
	}
}

// serve registers the devices with the kubelet and serves it. It returns nil when the kubelet has
// removed the socket, or ctx is done.
func (p *plugin) serve(ctx context.Context) error {
	path := filepath.Join(p.Kubelet, p.endpoint())
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the old socket: %w", err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return fmt.Errorf("make %s: %w: is the kubelet running, and is its folder mounted?", path, printable.Reason(err))
	}
	own, err := os.Lstat(path)
	if err != nil {
		l.Close()
		return err
	}
	server := grpc.NewServer()
	v1beta1.RegisterDevicePluginServer(server, p)
	done := make(chan error, 1)
	go func() { done <- server.Serve(l) }()
	defer func() {
		server.Stop()
		<-done
	}()
	if err := p.register(ctx); err != nil {
		return err
	}
	p.log.Info("registered with the kubelet", "resource", p.Resource)
	stale := repeated{log: p.log, text: "slots or CDI files"}
	for {
		if !pause(ctx, p.Period) {
			return nil
		}
		stale.warn(time.Now(), p.look(ctx))
		if now, err := os.Lstat(path); err != nil || !os.SameFile(own, now) {
			p.log.Info("the kubelet has restarted")
			return nil
		}
	}
}

func (p *plugin) register(ctx context.Context) error {
	conn, err := grpc.NewClient("unix://"+filepath.Join(p.Kubelet, "kubelet.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("kubelet: %w", err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	_, err = v1beta1.NewRegistrationClient(conn).Register(ctx, &v1beta1.RegisterRequest{
		Version: v1beta1.Version, Endpoint: p.endpoint(), ResourceName: p.Resource,
	})
	if status.Code(err) == codes.Unavailable {
		return fmt.Errorf("no kubelet answers at %s/kubelet.sock: is it running?", p.Kubelet)
	}
	if err != nil {
		return fmt.Errorf("register with the kubelet: %s", status.Convert(err).Message())
	}
	return nil
}

// look reads the slots, checks that the daemon answers, and publishes changes.
func (p *plugin) look(ctx context.Context) error {
	ask, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	why := p.Alive(ask)
	if ctx.Err() != nil {
		return nil // ctx was canceled, the daemon may be fine
	}
	names, err := slots(p.Slots, why == nil)
	if err != nil {
		return err
	}
	// Somebody may have removed the file, or installed the libraries since.
	err = writeCDI(p.config, names)
	health := v1beta1.Healthy
	if why != nil || err != nil { // without the file no container starts
		health = v1beta1.Unhealthy
	}
	devices := make([]*v1beta1.Device, 0, len(names))
	for _, name := range names {
		devices = append(devices, &v1beta1.Device{ID: name, Health: health})
	}

	p.mu.Lock()
	defer p.mu.Unlock()
	if slices.EqualFunc(devices, p.devices, func(a, b *v1beta1.Device) bool { return a.ID == b.ID && a.Health == b.Health }) && p.devices != nil {
		return err
	}
	p.log.Info("units", "count", len(names), "health", health, "daemon", why)
	p.devices = devices
	close(p.changed)
	p.changed = make(chan struct{})
	return err
}

// slots returns the names of the folders in dir, in order. While the daemon is alive, a folder without its socket is left
// from a larger number of slots; a daemon that stops removes all sockets. The daemon's own files begin with a dot; one that was
// killed may leave a folder.
func slots(dir string, alive bool) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // the daemon has not created it yet
	}
	if err != nil {
		return nil, fmt.Errorf("slots: %w", err)
	}
	var names []string
	for _, e := range entries {
		info, err := os.Lstat(filepath.Join(dir, e.Name(), "iwarpd.sock"))
		if e.IsDir() && !strings.HasPrefix(e.Name(), ".") && (!alive || err == nil && info.Mode()&fs.ModeSocket != 0) {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// GetDevicePluginOptions returns no options.
func (p *plugin) GetDevicePluginOptions(context.Context, *v1beta1.Empty) (*v1beta1.DevicePluginOptions, error) {
	return &v1beta1.DevicePluginOptions{}, nil
}

// ListAndWatch sends the list of devices, and again after each change.
func (p *plugin) ListAndWatch(_ *v1beta1.Empty, stream grpc.ServerStreamingServer[v1beta1.ListAndWatchResponse]) error {
	for {
		p.mu.Lock()
		devices, changed := p.devices, p.changed
		p.mu.Unlock()
		if err := stream.Send(&v1beta1.ListAndWatchResponse{Devices: devices}); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

// Allocate returns the CDI devices for each container. A container that requests several units gets
// the socket of the first one, since a program opens only one.
func (p *plugin) Allocate(_ context.Context, req *v1beta1.AllocateRequest) (*v1beta1.AllocateResponse, error) {
	p.mu.Lock()
	devices := p.devices
	p.mu.Unlock()
	var reply v1beta1.AllocateResponse
	for _, c := range req.ContainerRequests {
		ids := slices.Sorted(slices.Values(c.DevicesIds))
		for _, id := range ids {
			if !slices.ContainsFunc(devices, func(d *v1beta1.Device) bool { return d.ID == id }) {
				return nil, status.Errorf(codes.NotFound, "no unit %q of %s on this node", id, p.Resource)
			}
		}
		if len(ids) == 0 {
			return nil, status.Error(codes.InvalidArgument, "a container without units")
		}
		response := &v1beta1.ContainerAllocateResponse{
			CdiDevices: []*v1beta1.CDIDevice{{Name: p.Resource + "=" + ids[0]}},
		}
		if p.libraries() != "" { // not by CDI, which would replace the pod's own value
			response.Envs = map[string]string{"LD_LIBRARY_PATH": inLibraries}
		}
		reply.ContainerResponses = append(reply.ContainerResponses, response)
	}
	return &reply, nil
}

// pause waits for d. It returns false if ctx was done first.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
