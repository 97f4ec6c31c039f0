{{- define "iwarpd.labels" -}}
app.kubernetes.io/name: iwarpd
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .group }}
iwarpd.io/group: {{ . }}
{{- end }}
{{- end }}

{{- define "iwarpd.name" -}}
{{- if .group }}{{ .root.Release.Name }}-{{ .group }}{{ else }}{{ .root.Release.Name }}{{ end }}
{{- end }}

{{- define "iwarpd.config" -}}
{{- $c := deepCopy .root.Values.config }}
{{- $c = mergeOverwrite $c (.values.config | default dict) }}
{{- $_ := set $c "interface" (required (printf "name the interface to serve: interface, or groups.%s.interface" (.group | default "NAME")) (.values.interface | default .root.Values.interface)) }}
{{- $_ := set $c "socket" (printf "%s/iwarpd.sock" .root.Values.runDir) }}
{{- $_ := set $c "slots" (mergeOverwrite (dict "folder" (printf "%s/slots" .root.Values.runDir)) .root.Values.slots) }}
{{- toYaml $c }}
{{- end }}
