package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"

	"github.com/spf13/cobra"

	"github.com/iwarpd/iwarpd/ctrl"
	"github.com/iwarpd/iwarpd/ctrl/hostnet"
	"github.com/iwarpd/iwarpd/ctrl/nftset"
	"github.com/iwarpd/iwarpd/dataplane/ifqueue"
	"github.com/iwarpd/iwarpd/dataplane/xsk/hostcheck"
	"github.com/iwarpd/iwarpd/shm"
)

// doctorCommand returns the command that checks the host and the interface.
func doctorCommand() *cobra.Command {
	var names listFlag
	var file, transport string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "doctor [--interface IF | --transport socket]",
		Short: "Report what this host lacks for iwarpd, and suggest fixes",
		Long: "doctor checks the kernel, its own capabilities and limits, the interface, its\n" +
			"driver, queues and offloads; for kernel sockets (--transport socket) only the\n" +
			"limits. It changes nothing. Run it as root, since it checks its own privileges.\n\n" +
			"Exit codes: 0 iwarpd can work, 1 it cannot, 2 wrong flag or configuration.",
		Example: "  iwarpd doctor --interface eth0\n  iwarpd doctor --transport socket\n  iwarpd doctor --config /etc/iwarpd/iwarpd.yaml --json",
		Args:    noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := settingsOf(file, names.value, transport)
			if err != nil {
				return err
			}
			serves := s.names()
			findings, err := judgeNames(serves, s.Loopback)
			if err != nil {
				return err
			}
			findings = append(findings, judgeWorkers(s.workers())...)
			findings = append(findings, judgeCPUs(s.CPUs)...)
			findings = append(findings, judgeSets(s.AllowSets)...)
			if err := printFindings(cmd.OutOrStdout(), findings, asJSON); err != nil {
				return err
			}
			if hostcheck.Worst(findings) != hostcheck.Fail {
				return nil
			}
			on, or := strings.Join(serves, ","), ", "+instead
			if len(serves) == 0 {
				on, or = kernelSockets, ""
			}
			return exitErr(exitFailure, "iwarpd cannot work on %q as it is: change what is marked fail%s", on, or)
		},
	}
	cmd.Flags().VarP(&names, "interface", "i", "interfaces; default: those of the configuration")
	cmd.Flags().StringVarP(&file, "config", "c", "", "configuration file; also "+envPrefix+"CONFIG")
	cmd.Flags().StringVar(&transport, "transport", "", "afxdp, socket or both; default: that of the configuration")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	completions(cmd)
	return cmd
}

// judgeNames returns the findings about the host and the interfaces. Without interfaces it
// returns those for kernel sockets.
func judgeNames(names []string, loopback bool) (findings []hostcheck.Finding, err error) {
	if len(names) == 0 {
		facts, err := hostcheck.Gather("")
		if err != nil {
			return nil, err
		}
		facts.Unguarded = shm.Guarded()
		return hostcheck.JudgeSockets(facts), nil
	}
	for i, name := range names {
		facts, err := hostcheck.Gather(name, names...)
		if err != nil {
			return nil, err
		}
		facts.Unguarded = shm.Guarded()
		if loopback && facts.Interface != nil {
			facts.Interface.Addresses += hostnet.OnLoopback()
		}
		if i == 0 {
			findings = hostcheck.JudgeHost(facts)
		}
		for _, f := range hostcheck.JudgeInterface(facts) {
			if len(names) > 1 {
				f.Check = name + " " + f.Check
			}
			findings = append(findings, f)
		}
	}
	return findings, nil
}

// workers returns the number of workers that a daemon with these settings has now.
func (s *settings) workers() (n int) {
	if s.Transport == "socket" {
		return max(len(s.Queues), 1)
	}
	for _, name := range s.names() {
		queues := len(s.Queues)
		if queues == 0 {
			queues, _ = ifqueue.Workers(name, s.Link, s.XDPMode) // an interface that does not exist has its own finding
		}
		n += queues
	}
	if s.Transport == "both" {
		n++
	}
	return n
}

// judgeWorkers returns a finding if a daemon cannot have so many workers.
func judgeWorkers(workers int) (findings []hostcheck.Finding) {
	if workers > ctrl.MaxWorkers {
		text := fmt.Sprintf("%d for as many queues: a daemon has at most %d", workers, ctrl.MaxWorkers)
		findings = append(findings, hostcheck.Finding{
			Check: "workers", State: hostcheck.Fail, Text: text, Fix: fewerQueues,
		})
	}
	if most, least := ctrl.Threads(), leastThreads(workers); most < least {
		text := fmt.Sprintf("at most %d, and iwarpd needs %d", most, least)
		findings = append(findings, hostcheck.Finding{
			Check: "threads", State: hostcheck.Fail, Text: text, Fix: moreThreads,
		})
	}
	return findings
}

// judgeCPUs returns a finding if there is a CPU to which no worker can be pinned.
func judgeCPUs(cpus []int) []hostcheck.Finding {
	err := checkCPUs(cpus, len(cpus))
	if err == nil {
		return nil
	}
	text := strings.TrimPrefix(err.Error(), "cpus: ")
	return []hostcheck.Finding{{Check: "cpus", State: hostcheck.Fail, Text: text, Fix: "choose others with --cpus"}}
}

// judgeSets returns a finding for each set of allow-set.
func judgeSets(sets []nftset.Name) (findings []hostcheck.Finding) {
	for _, n := range sets {
		f := hostcheck.Finding{Check: "allow-set", State: hostcheck.OK, Text: fmt.Sprintf("the nftables set %v exists", n)}
		err := nftset.Check(n)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			f.State, f.Text, f.Fix = hostcheck.Warn, fmt.Sprintf("the nftables set %v does not exist, so it allows no peer", n), n.Fix()
		case err != nil:
			f.State, f.Text = hostcheck.Fail, fmt.Sprintf("the nftables set %v cannot be used: %v", n, err)
		}
		findings = append(findings, f)
	}
	return findings
}

// settingsOf reads the configuration, in which name and transport, unless they are "", replace the interface and the
// transport.
func settingsOf(file, name, transport string) (*settings, error) {
	flags := (&cobra.Command{}).Flags()
	addFlags(flags)
	for flag, value := range map[string]string{"interface": name, "transport": transport} {
		if value == "" {
			continue
		}
		if err := flags.Set(flag, value); err != nil {
			return nil, err
		}
	}
	return load(flags, file)
}

func printFindings(w io.Writer, findings []hostcheck.Finding, asJSON bool) error {
	if asJSON {
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		return enc.Encode(findings)
	}
	for _, f := range findings {
		if _, err := fmt.Fprintf(w, "%-4s  %-17s  %s\n", f.State, f.Check, f.Text); err != nil {
			return err
		}
		if f.Fix != "" {
			fmt.Fprintf(w, "%4s  %17s  fix: %s\n", "", "", f.Fix)
		}
	}
	return nil
}
