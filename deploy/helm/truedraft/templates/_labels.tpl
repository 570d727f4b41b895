{{- define "truedraft.selector" -}}
app.kubernetes.io/name: truedraft
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "truedraft.labels" -}}
{{ include "truedraft.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}
{{/* How probes, scrapes and the service's port reach the server: by TLS where it has a certificate. */}}
{{- define "truedraft.scheme" -}}
{{ if or .Values.tlsSecret .Values.config.ssl_certfile }}HTTPS{{ else }}HTTP{{ end }}
{{- end }}
