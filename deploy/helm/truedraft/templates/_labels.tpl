{{- define "truedraft.selector" -}}
app.kubernetes.io/name: truedraft
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "truedraft.labels" -}}
{{ include "truedraft.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}
