package kerneltcp

import (
	"fmt"
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestOffloads connects to a kernel with the default offloads of containers and virtual machines: it leaves checksums
// partial, and sends and receives frames of 64 KiB.
func TestOffloads(t *testing.T) {
	parallel(t)
	for _, mtu := range []int{1500, 9000} {
		v := testenv.NewVethOffloads(t, mtu)
		for _, v6 := range []bool{false, true} {
			for i, w := range talks {
				t.Run(fmt.Sprintf("MTU %d, %s, IPv6 %v", mtu, w.name, v6), func(t *testing.T) {
					ours, _ := converse(t, &v.A, &v.B, i, 16<<20, v6, nil, nil)
					e := &ours.Engine[0]
					if e.RxPartial == 0 {
						t.Error("no segment with a partial checksum")
					}
					if ours.Received > 1<<20 && e.RxSuper == 0 {
						t.Error("no super-frame received")
					}
					if ours.Sent > 1<<20 && e.TxSuper == 0 {
						t.Error("no super-frame sent")
					}
					if e.RxChecksum+e.TxSuperRefused+e.TxSuperDropped+e.Link.RxInvalid != 0 {
						t.Errorf("%d checksums wrong, %d super-frames refused, %d dropped, %d received with too many pieces",
							e.RxChecksum, e.TxSuperRefused, e.TxSuperDropped, e.Link.RxInvalid)
					}
					t.Logf("ours %.0f MB/s in, %d of %d frames sent and %d of %d received are super-frames", ours.MBps, e.TxSuper, e.TxFrames, e.RxSuper, e.RxFrames)
				})
			}
		}
	}
}

// TestSegmented makes the kernel segment our super-frames on the way, at an interface without segmentation offload.
func TestSegmented(t *testing.T) {
	parallel(t)
	w := testenv.NewBridged(t, 1500)
	for _, v6 := range []bool{false, true} {
		for i, talk := range talks[:3] {
			t.Run(fmt.Sprintf("%s, IPv6 %v", talk.name, v6), func(t *testing.T) {
				ours, _ := converse(t, &w.A, &w.B, i, 16<<20, v6, nil, nil)
				e := &ours.Engine[0]
				if ours.Sent > 1<<20 && e.TxSuper == 0 {
					t.Error("no super-frame sent")
				}
				if e.TxSuperDropped != 0 {
					t.Errorf("%d super-frames dropped", e.TxSuperDropped)
				}
			})
		}
	}
}
