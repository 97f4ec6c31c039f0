package main

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// leftFree is how much memory hold leaves to everything else, in bytes.
const leftFree = 4 << 30

// reportingOrder is the parameter of Linux's free page reporting: the kernel sets it to
// the order of the blocks that it reports once a hypervisor asks for reports.
const reportingOrder = "/sys/module/page_reporting/parameters/page_reporting_order"

// hold takes most of the free memory of a virtual machine whose hypervisor takes back what
// the guest does not use, until release is called. Each page of such memory costs a fault in
// the hypervisor when the guest uses it again, and the kernel's packet buffers come from it
// in some measurements and not in others. Held, what is left stays in use. Elsewhere hold
// does nothing.
func hold() (release func(), err error) {
	none := func() {}
	if !reports(reportingOrder) {
		return none, nil
	}
	free, err := memFree("/proc/meminfo")
	if err != nil {
		return none, err
	}
	n := free - leftFree
	if n <= 0 {
		return none, nil
	}
	began := time.Now()
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return none, fmt.Errorf("hold %d bytes of memory: %w", n, err)
	}
	release = func() { _ = unix.Munmap(b) }
	_ = unix.Madvise(b, unix.MADV_HUGEPAGE) // quicker, if the kernel has it
	for i := 0; i < n; i += os.Getpagesize() {
		b[i] = 1
	}
	fmt.Printf("The hypervisor takes free memory back: %d MiB are held meanwhile, which took %.0f s.\n", n>>20, time.Since(began).Seconds())
	return release, nil
}

// holdMain holds memory for another measurement, prints a line once it does, and releases it when standard input ends.
func holdMain() error {
	release, err := hold()
	if err != nil {
		return err
	}
	defer release()
	fmt.Println(readyLine)
	untilStdinEnds()
	return nil
}

// reports returns whether the kernel reports free pages; file is reportingOrder.
func reports(file string) bool {
	b, err := os.ReadFile(file)
	if err != nil {
		return false
	}
	order, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 32)
	return err == nil && order < 32 // at first it is the largest number
}

// memFree returns MemFree of file, which is /proc/meminfo, in bytes.
func memFree(file string) (int, error) {
	f, err := os.Open(file)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		var kib int
		if n, _ := fmt.Sscanf(s.Text(), "MemFree: %d kB", &kib); n == 1 {
			return kib << 10, nil
		}
	}
	return 0, fmt.Errorf("%s: no MemFree", file)
}
