package main

import (
	"fmt"
	"math"
	"os"
	"strings"
	"text/template"
)

// A plotBar is the bar of a row. Lengths are in pixels.
type plotBar struct {
	Y, X, Width float64
	Color       string
	Name, Text  string // before and after the bar
}

// A plotMark is a ratio on the axis.
type plotMark struct {
	X    float64
	Text string
}

const (
	plotOne    = 360 // where a bar of ratio 1 begins and ends
	plotDouble = 55  // length of a bar of ratio 2
	plotRow    = 16  // height of a row
	plotTop    = 40
)

// plotSVG draws a bar for each row, to the right of the middle line if iwarpd is faster.
var plotSVG = template.Must(template.New("plot").Parse(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {{.Height}}" font-family="sans-serif" font-size="11">
<title>iwarpd compared with the kernel's TCP</title>
<rect width="860" height="{{.Height}}" fill="white"/>
<text x="10" y="16" font-size="13">How many times faster than the kernel's TCP with segmentation offload (medians of ratios; left of 1 the kernel is faster)</text>
{{range .Marks}}<line x1="{{.X}}" y1="36" x2="{{.X}}" y2="{{$.Height}}" stroke="#ccc"/><text x="{{.X}}" y="32" text-anchor="middle">{{.Text}}</text>
{{end}}{{range .Bars}}<text x="225" y="{{.Y}}" dy="11" text-anchor="end">{{.Name}}</text><rect x="{{.X}}" y="{{.Y}}" width="{{.Width}}" height="13" fill="{{.Color}}"/><text x="670" y="{{.Y}}" dy="11">{{.Text}}</text>
{{end}}</svg>
`))

// plot writes a picture of the rows that are compared with the kernel's TCP to the file name.
// The axis is logarithmic.
func plot(name string, rows []row) error {
	var data struct {
		Height float64
		Marks  []plotMark
		Bars   []plotBar
	}
	for exp := -2; exp <= 5; exp++ {
		text := fmt.Sprint(1 << max(exp, 0))
		if exp < 0 {
			text = fmt.Sprintf("1/%d", 1<<-exp)
		}
		data.Marks = append(data.Marks, plotMark{plotOne + float64(exp)*plotDouble, text})
	}
	y := float64(plotTop)
	for _, r := range rows {
		if !strings.HasSuffix(r.Peer, "tcp-gso") || r.Ratio <= 0 {
			continue
		}
		width := math.Log2(r.Ratio) * plotDouble
		color := "#3a7d44"
		if width < 0 {
			color = "#b5482f"
		}
		data.Bars = append(data.Bars, plotBar{
			Y: y, X: math.Round(plotOne + min(width, 0)), Width: math.Round(math.Abs(width)), Color: color,
			Name: fmt.Sprintf("%s %s, MTU %d", r.Workload, sizeName(r.Size), r.MTU),
			Text: fmt.Sprintf("%s: %s, kernel %s %s", short(r.Ratio), short(r.Ours.Median), short(r.Theirs.Median), r.Unit),
		})
		y += plotRow
	}
	if len(data.Bars) == 0 {
		return fmt.Errorf("no row compares with the kernel's TCP")
	}
	data.Height = y + plotRow/2
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	if err := plotSVG.Execute(f, &data); err != nil {
		f.Close()
		return err
	}
	return f.Close()
}
