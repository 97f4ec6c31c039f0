package testenv

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// asUnit is the first argument of a test program that runs the rest of its command line with a filter.
const asUnit = "system-calls="

func init() {
	if len(os.Args) > 2 && strings.HasPrefix(os.Args[1], asUnit) {
		err := execFiltered(os.Args[1][len(asUnit):], os.Args[2:])
		fmt.Fprintln(os.Stderr, "testenv: with a filter of system calls:", err)
		os.Exit(1)
	}
}

// execFiltered executes a program that may make only the system calls of list, as SystemCallFilter= of systemd does. The first
// number in list is what seccomp does about others.
func execFiltered(list string, args []string) error {
	otherwise, list, _ := strings.Cut(list, ",")
	action, err := strconv.ParseUint(otherwise, 10, 32)
	if err != nil {
		return err
	}
	filter := []unix.SockFilter{{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS}} // the number, first in struct seccomp_data
	for s := range strings.SplitSeq(list, ",") {
		n, err := strconv.ParseUint(s, 10, 32)
		if err != nil {
			return err
		}
		filter = append(filter, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: 1, K: uint32(n)},
			unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW})
	}
	filter = append(filter, unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: uint32(action)})
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	runtime.LockOSThread() // the filter is that of the thread which executes the program
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&prog)))
	if errno != 0 {
		return errno
	}
	return unix.Exec(args[0], args, os.Environ())
}

// Unit returns the beginning of a command line: the program at the path that follows, with its arguments, runs as root with the
// capabilities and the system calls that the unit of systemd in file allows, and the system calls more.
func Unit(t testing.TB, file string, more ...string) []string {
	t.Helper()
	RequireRoot(t)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	caps := "-all"
	for _, c := range setting(t, file, "CapabilityBoundingSet") {
		caps += ",+" + strings.ToLower(strings.TrimPrefix(c, "CAP_"))
	}
	if strings.Contains(string(ReadFile(t, file)), "\nLimitMEMLOCK=infinity\n") { // which root of a container may not set
		caps += ",+ipc_lock"
	}
	var calls []string
	known := numbers(t)
	for name := range systemCalls(t, append(setting(t, file, "SystemCallFilter"), more...)) {
		if n, ok := known[name]; ok { // others are of other architectures
			calls = append(calls, n)
		}
	}
	slices.Sort(calls)
	otherwise := uint64(unix.SECCOMP_RET_KILL_PROCESS)
	if strings.Contains(string(ReadFile(t, file)), "\nSystemCallErrorNumber=EPERM\n") {
		otherwise = uint64(unix.SECCOMP_RET_ERRNO) | uint64(unix.EPERM)
	}
	calls = append([]string{strconv.FormatUint(otherwise, 10)}, calls...)
	return []string{RequireTool(t, "setpriv"), "--bounding-set", caps, "--inh-caps", "-all", exe, asUnit + strings.Join(calls, ",")}
}

// setting returns the words of a setting of a unit.
func setting(t testing.TB, file, name string) (words []string) {
	t.Helper()
	lines := regexp.MustCompile(`(?m)^`+name+`=(.*)$`).FindAllSubmatch(ReadFile(t, file), -1)
	if len(lines) == 0 {
		t.Fatalf("%s has no %s", file, name)
	}
	for _, line := range lines {
		words = append(words, strings.Fields(string(line[1]))...)
	}
	return words
}

// systemCalls returns the names of system calls in words, some of which are sets of systemd.
func systemCalls(t testing.TB, words []string) map[string]bool {
	t.Helper()
	out, err := exec.Command(RequireTool(t, "systemd-analyze"), "syscall-filter").Output()
	if err != nil {
		t.Fatal(err)
	}
	sets, set := make(map[string][]string), ""
	for line := range strings.Lines(string(out)) {
		switch word := strings.TrimSpace(line); {
		case strings.HasPrefix(line, "@"):
			set = word
		case word != "" && word[0] != '#':
			sets[set] = append(sets[set], word)
		}
	}
	calls := make(map[string]bool)
	var add func(words []string)
	add = func(words []string) {
		for _, w := range words {
			if w[0] != '@' {
				calls[w] = true
				continue
			}
			if len(sets[w]) == 0 {
				t.Fatalf("systemd-analyze knows no set %s", w)
			}
			add(sets[w])
		}
	}
	add(append([]string{"@default"}, words...))
	return calls
}

// numbers returns the numbers of the system calls of this machine.
func numbers(t testing.TB) map[string]string {
	t.Helper()
	headers, err := filepath.Glob("/usr/include/*/asm/unistd_64.h")
	if err != nil || len(headers) != 1 {
		Skip(t, "needs the headers of the kernel: found %q, %v", headers, err)
	}
	calls := make(map[string]string)
	for _, m := range regexp.MustCompile(`(?m)^#define __NR_(\w+) (\d+)$`).FindAllSubmatch(ReadFile(t, headers[0]), -1) {
		calls[string(m[1])] = string(m[2])
	}
	return calls
}
