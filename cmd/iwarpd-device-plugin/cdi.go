package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"

	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"
)

// Paths in containers. The folder is mounted, not the socket, since a mounted socket would become
// stale when the daemon restarts.
const (
	inSocketDir = "/run/iwarpd"
	inLibraries = "/usr/lib/iwarpd"
)

// libraries returns the folder of the libraries, or "" if it has none, because the package iwarpd-verbs is not
// installed. The chart makes an empty folder then, which would hide one of the container's image.
func (c *config) libraries() string {
	if _, err := os.Stat(filepath.Join(c.Libraries, "libibverbs.so.1")); c.Libraries == "" || err != nil {
		return ""
	}
	return c.Libraries
}

// spec returns a CDI device for each slot.
func spec(c config, names []string) *specs.Spec {
	s := &specs.Spec{Kind: c.Resource}
	s.ContainerEdits.Env = []string{"IWARPD_SOCKET=" + inSocketDir + "/iwarpd.sock"}
	if c.Libraries != "" {
		s.ContainerEdits.Mounts = []*specs.Mount{{
			HostPath: c.Libraries, ContainerPath: inLibraries, Options: []string{"ro", "nosuid", "nodev", "rbind"},
		}}
	}
	for _, name := range names {
		s.Devices = append(s.Devices, specs.Device{Name: name, ContainerEdits: specs.ContainerEdits{
			Mounts: []*specs.Mount{{
				HostPath: filepath.Join(c.Slots, name), ContainerPath: inSocketDir, Options: []string{"ro", "nosuid", "nodev", "noexec", "bind"},
			}},
		}})
	}
	// A runtime refuses a file of a later version than it knows: containerd 1.7.0 and podman 4.3 know 0.5.0.
	s.Version, _ = specs.MinimumRequiredVersion(s) // returns no error
	return s
}

// writeCDI makes the CDI file of the resource current. It removes the file if there are no slots,
// since CDI does not allow a file without devices.
func writeCDI(c config, names []string) error {
	file := c.file() + ".json"
	path := filepath.Join(c.CDI, file)
	if len(names) == 0 {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("CDI: %w", err)
		}
		return nil
	}
	c.Libraries = c.libraries()
	want := spec(c, names)
	if is, err := cdi.ReadSpec(path, 0); err == nil && reflect.DeepEqual(is.Spec, want) {
		return nil
	}
	cache, err := cdi.NewCache(cdi.WithAutoRefresh(false), cdi.WithSpecDirs(c.CDI))
	if err != nil {
		return fmt.Errorf("CDI: %w", err)
	}
	if err := cache.WriteSpec(want, file); err != nil {
		return fmt.Errorf("CDI: %w", err)
	}
	return nil
}
