package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/internal/printable"
)

func (c *command) capture() *cobra.Command {
	var file, peer string
	var filter iwarp.CaptureFilter
	var count int
	var length time.Duration
	cmd := &cobra.Command{
		Use: "capture [QP]", Short: "Write frames that the daemon receives and sends to a pcapng file",
		Long: "Capture frames that bypass the kernel, in both directions, to a pcapng file for\n" +
			"Wireshark or tshark. Without a queue pair, which needs administrator rights, all\n" +
			"frames are captured, or those of an address and port. tcpdump sees these frames\n" +
			"only where iwarpd uses packet sockets.\n\n" +
			"Wireshark recognizes MPA by the first frames of a connection. To see RDMAP,\n" +
			"begin the capture with --host before the connection is made.",
		Example: "  iwarpctl capture 3 -w conn.pcapng\n" +
			"  iwarpctl capture --host 10.0.0.2:7174 -w start.pcapng --count 1000\n" +
			"  iwarpctl capture --host 10.0.0.2:7174 -w - | tshark -r - -O iwarp_ddp_rdmap",
		Args: usageArgs(cobra.MaximumNArgs(1)), ValidArgsFunction: c.completeQP,
		RunE: func(cmd *cobra.Command, args []string) error {
			if file == "" {
				return usageError{errors.New("missing output: use -w FILE, or -w - for standard output")}
			}
			if len(args) == 1 {
				num, err := qpNumber(args[0])
				if err != nil {
					return err
				}
				filter.QP = num
			}
			if err := hostFilter(peer, &filter); err != nil {
				return err
			}
			if filter.SnapLen < 0 || count < 0 || length < 0 {
				return usageError{errors.New("capture: --snaplen, --count and --duration must not be negative")}
			}
			if filter.QP != 0 && peer != "" {
				return usageError{errors.New("a queue pair already selects an address: omit --host")}
			}
			return c.runCapture(cmd.Context(), file, filter, count, length)
		},
	}
	cmd.Flags().StringVarP(&file, "write", "w", "", "pcapng file to write; - for standard output")
	cmd.Flags().StringVar(&peer, "host", "", "capture frames with this address, address:port or :port on either side")
	cmd.Flags().IntVar(&filter.SnapLen, "snaplen", 0, "maximum number of bytes kept of each frame; 0: all")
	cmd.Flags().IntVarP(&count, "count", "n", 0, "number of frames to capture; 0: until interrupted")
	cmd.Flags().DurationVar(&length, "duration", 0, "how long to capture; 0: until interrupted")
	return cmd
}

// hostFilter parses --host.
func hostFilter(s string, f *iwarp.CaptureFilter) error {
	if s == "" {
		return nil
	}
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		host, port = unbracket(s), ""
	}
	if host != "" || err != nil {
		if _, err := netip.ParseAddr(host); err != nil {
			return usageError{fmt.Errorf("--host %s: %q is not an IP address", s, host)}
		}
	}
	f.Address = host
	if err != nil { // an address alone
		return nil
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		return usageError{fmt.Errorf("--host %s: %q is not a port", s, port)}
	}
	f.Port = uint16(n)
	return nil
}

// captured is the JSON form of a capture's result.
type captured struct {
	Frames  int    `json:"frames"`
	Bytes   int64  `json:"bytes"`
	Dropped uint64 `json:"dropped"`
}

func (c *command) runCapture(ctx context.Context, file string, filter iwarp.CaptureFilter, count int, length time.Duration) error {
	dev, err := c.open(ctx)
	if err != nil {
		return err
	}
	defer dev.Close()
	tap, err := dev.Admin().Capture(ctx, filter)
	if err != nil {
		return err
	}
	defer tap.Close()
	out := c.out
	if file != "-" {
		// The capture contains data that only the owner of the connection may see.
		f, err := openOutput(file, os.O_CREATE, 0o600)
		if err != nil {
			return err
		}
		defer f.Close()
		out = f
	} else if f, ok := c.file(); ok && term.IsTerminal(int(f.Fd())) {
		return usageError{errors.New("-w -: standard output is a terminal; write to a file, or into a pipe")}
	}
	if length > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, length)
		defer cancel()
	}
	defer context.AfterFunc(ctx, func() { tap.Close() })()
	have, err := writeCapture(out, tap, dev.Attr(), count)
	if ctx.Err() != nil { // interrupted by the user
		err = nil
	}
	if err == nil && file != "-" {
		if f, ok := out.(*os.File); ok {
			err = f.Close()
		}
	}
	if err != nil {
		return err
	}
	if c.json && file != "-" {
		return c.print(have)
	}
	fmt.Fprintf(c.err, "%s, %s, %d dropped\n", printable.Count(have.Frames, "frame"), bytesText(uint64(have.Bytes)), have.Dropped)
	return nil
}

// writeCapture writes count frames, or all until the capture ends if count is 0, as pcapng.
func writeCapture(w io.Writer, s *iwarp.Capture, dev iwarp.DeviceAttr, count int) (have captured, err error) {
	ng, err := pcapgo.NewNgWriterInterface(w, pcapgo.NgInterface{
		Name: dev.Interface, Description: "frames that " + dev.Server + " receives and sends", LinkType: layers.LinkTypeEthernet,
		SnapLength: uint32(s.SnapLen()), TimestampResolution: 9,
	}, pcapgo.NgWriterOptions{SectionInfo: pcapgo.NgSectionInfo{Application: "iwarpctl " + version}})
	if err != nil {
		return have, err
	}
	if err := ng.Flush(); err != nil { // write the header even if no frame follows
		return have, err
	}
	began := time.Now()
	err = func() error {
		for have.Frames < count || count == 0 {
			f, err := s.Next()
			if errors.Is(err, io.EOF) {
				return fmt.Errorf("the daemon ended the capture: %w", iwarp.ErrDaemonGone)
			}
			if err != nil {
				return err
			}
			dir := pcapgo.NgEpbFlagDirectionInbound
			if f.Out {
				dir = pcapgo.NgEpbFlagDirectionOutbound
			}
			lost, queue := f.Dropped-have.Dropped, uint32(f.Worker)
			have.Frames, have.Bytes, have.Dropped = have.Frames+1, have.Bytes+int64(f.Size), f.Dropped
			err = ng.WritePacketWithOptions(
				gopacket.CaptureInfo{Timestamp: f.Time, CaptureLength: len(f.Data), Length: f.Size},
				f.Data, pcapgo.NgPacketOptions{Flags: &pcapgo.NgEpbFlags{Direction: dir}, DropCount: &lost, Queue: &queue})
			if err != nil {
				return err
			}
			if err := ng.Flush(); err != nil { // keep the file valid if interrupted, and show frames in a pipe at once
				return err
			}
		}
		return nil
	}()
	// Write the statistics unless the output is a closed pipe.
	if serr := ng.WriteInterfaceStats(0, pcapgo.NgInterfaceStatistics{
		LastUpdate: time.Now(), StartTime: began, EndTime: time.Now(),
		PacketsReceived: uint64(have.Frames) + have.Dropped, PacketsDropped: have.Dropped,
	}); err == nil {
		err = serr
	}
	if serr := ng.Flush(); err == nil {
		err = serr
	}
	return have, err
}
