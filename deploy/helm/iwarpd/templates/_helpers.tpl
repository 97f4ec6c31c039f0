{{- define "iwarpd.labels" -}}
app.kubernetes.io/name: iwarpd
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
{{- with .group }}
iwarpd.io/group: {{ . | quote }}
{{- end }}
{{- end }}

{{- define "iwarpd.name" -}}
{{- if .group }}{{ .root.Release.Name }}-{{ .group }}{{ else }}{{ .root.Release.Name }}{{ end }}
{{- end }}

{{/* Those of a group count in place of the chart's. */}}
{{- define "iwarpd.interfaces" -}}
{{- $v := ternary .values .root.Values (or .values.interface .values.interfaces | not | not) }}
{{- if and $v.interface $v.interfaces }}{{ fail "interface and interfaces are both set: one of them names all that the daemon serves" }}{{ end }}
{{- toYaml (compact (append ($v.interfaces | default list) $v.interface)) }}
{{- end }}

{{- define "iwarpd.config" -}}
{{- $c := deepCopy .root.Values.config }}
{{- $c = mergeOverwrite $c (.values.config | default dict) }}
{{- $all := include "iwarpd.interfaces" . | fromYamlArray }}
{{- if ne ($c.transport | default "") "socket" }}
{{- if not $all }}{{ fail (printf "name the interface to serve: interface, or groups.%s.interface" (.group | default "NAME")) }}{{ end }}
{{- $_ := set $c "interfaces" $all }}
{{- end }}
{{- $_ := set $c "socket" (printf "%s/iwarpd.sock" .root.Values.runDir) }}
{{- $_ := set $c "slots" (merge (dict "folder" (printf "%s/slots" .root.Values.runDir)) .root.Values.slots) }}
{{- toYaml $c }}
{{- end }}
