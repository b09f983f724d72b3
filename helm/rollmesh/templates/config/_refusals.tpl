{{/* Values of which one would be ignored beside another one. */}}
{{- define "rollmesh.refuseIgnoredValues" -}}
{{- $redis := .Values.redis -}}
{{- if and $redis.enabled $redis.externalUrl -}}
{{- fail (printf "redis.externalUrl=%s with redis.enabled=true: a run has one Redis; set redis.enabled=false to use yours, or leave redis.externalUrl empty" $redis.externalUrl) -}}
{{- end -}}
{{- if and $redis.clientCertificate (not $redis.tlsSecret) -}}
{{- fail "redis.clientCertificate=true without redis.tlsSecret, which has the certificate: set redis.tlsSecret" -}}
{{- end -}}
{{- $checkpoints := .Values.checkpoints -}}
{{- if and $checkpoints.url $checkpoints.existingClaim -}}
{{- fail (printf "checkpoints.url=%s with checkpoints.existingClaim=%s: checkpoints have one place; leave one of them empty" $checkpoints.url $checkpoints.existingClaim) -}}
{{- end -}}
{{- if and .Values.generator.sglang.sidecar.enabled (not (include "rollmesh.sglangPlace" .)) -}}
{{- fail "generator.sglang.sidecar.enabled=true without run.generator.engine=sglang: set the engine, or turn the sidecar off" -}}
{{- end -}}
{{- $tls := .Values.security.tls -}}
{{- if and $tls.existingSecret $tls.certManager.issuerName -}}
{{- fail (printf "security.tls.existingSecret=%s with security.tls.certManager.issuerName=%s: certificates come from one of them; leave the other empty" $tls.existingSecret $tls.certManager.issuerName) -}}
{{- end -}}
{{- if and .Values.monitoring.podMonitor.enabled .Values.monitoring.serviceMonitor.enabled -}}
{{- fail "monitoring.podMonitor.enabled and monitoring.serviceMonitor.enabled: Prometheus would scrape each pod twice and sums would double; turn one of them off" -}}
{{- end -}}
{{- end -}}
