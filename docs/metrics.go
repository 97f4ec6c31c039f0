// Package docs embeds the pages of the documentation that a program quotes.
package docs

import _ "embed"

// Metrics is the page that describes the daemon's counters, in Markdown.
//
//go:embed metrics.md
var Metrics string
