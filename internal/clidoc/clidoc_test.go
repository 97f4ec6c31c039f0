package clidoc

import (
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

func TestMarkdown(t *testing.T) {
	root := &cobra.Command{Use: "tool", Short: "Tools", Long: "tool does <things>.\n\nExit codes:\n  0  done"}
	sub := &cobra.Command{Use: "cut FILE", Short: "Cut a file", Example: "  tool cut a", Run: func(*cobra.Command, []string) {}}
	sub.Flags().Int("size", 3, "pieces")
	hidden := &cobra.Command{Use: "secret", Hidden: true, Run: func(*cobra.Command, []string) {}}
	root.AddCommand(sub, hidden)
	var b strings.Builder
	if err := Markdown(&b, root); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"# tool\n\ntool does &lt;things&gt;.\n\nExit codes:\n\n```text\n  0  done\n```\n",
		"## tool cut\n\nCut a file.\n\n```text\ntool cut FILE [flags]\n```\n\nExamples:\n\n```text\n  tool cut a\n```\n",
		"--size int   pieces (default 3)",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
	if strings.Contains(b.String(), "secret") {
		t.Error("the page has a hidden command")
	}
}

func TestConfig(t *testing.T) {
	const file = "# About the file.\n\n# How fast.\n# For example:\n#   speed: 3\nspeed: 1\nlow-speed: 0\n\n# Rules.\nallow: []\n"
	const want = "# Configuration\n\nAbout the file.\n\n" +
		"## `speed`, `low-speed`\n\nHow fast.\nFor example:\n\n```text\n  speed: 3\n```\n\n```yaml\nspeed: 1\nlow-speed: 0\n```\n\n" +
		"`--speed`, `T_SPEED`\n\n`--low-speed`, `T_LOW_SPEED`\n\n" +
		"## `allow`\n\nRules.\n\n```yaml\nallow: []\n```\n\n"
	var b strings.Builder
	if err := Config(&b, strings.NewReader(file), "T_"); err != nil {
		t.Fatal(err)
	}
	if b.String() != want {
		t.Errorf("Config wrote\n%s\nwant\n%s", b.String(), want)
	}
}
