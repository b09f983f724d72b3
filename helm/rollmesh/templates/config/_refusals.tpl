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
{{- range $component := list "rollout" "generator" "reward" -}}
{{- $scaling := (index $.Values $component).autoscaling -}}
{{- if not $scaling.kind -}}
{{- range list "minReplicas" "maxReplicas" "behavior" -}}
{{- if get $scaling . -}}
{{- fail (printf "%s.autoscaling.%s=%v without its kind: nothing scales by it; set kind to hpa or keda" $component . (get $scaling .)) -}}
{{- end -}}
{{- end -}}
{{- else -}}
{{- $rule := include "rollmesh.scalingRule" (list $ $component) | fromYaml -}}
{{- $least := default $rule.minReplicas $scaling.minReplicas | int -}}
{{- $most := default $rule.maxReplicas $scaling.maxReplicas | int -}}
{{- if gt $least $most -}}
{{- fail (printf "%s.autoscaling.minReplicas=%d is above maxReplicas=%d: raise maxReplicas" $component $least $most) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- include "rollmesh.refuseWrongGpus" . -}}
{{- end -}}

{{/* The GPUs that a container may use, by any vendor and in parts: its resources. */}}
{{- define "rollmesh.gpus" -}}
{{- $gpus := 0 -}}
{{- range $resource, $amount := .limits -}}
{{- if regexMatch "/(gpu|mig-)" $resource -}}
{{- $gpus = add $gpus (int $amount) -}}
{{- end -}}
{{- end -}}
{{- $gpus -}}
{{- end -}}

{{/* Processes without a GPU of their own; without any GPU in the resources they compute on CPUs, or get them otherwise. */}}
{{- define "rollmesh.refuseWrongGpus" -}}
{{- $trainer := .Values.trainer -}}
{{- $gpus := include "rollmesh.gpus" $trainer.resources | int -}}
{{- if and $gpus (ne $gpus (int $trainer.processesPerNode)) -}}
{{- fail (printf "trainer.processesPerNode=%v with %d GPUs in trainer.resources: a rank uses one GPU; make the two numbers equal" $trainer.processesPerNode $gpus) -}}
{{- end -}}
{{- $sidecar := .Values.generator.sglang.sidecar -}}
{{- $pods := ternary .Values.generator.leaderWorkerSet.size 1 (eq .Values.generator.kind "LeaderWorkerSet") | int -}}
{{- $gpus = mul $pods (include "rollmesh.gpus" $sidecar.resources | int) | int -}}
{{- range $sidecar.args -}}
{{- $ranks := regexReplaceAll "^--(tp|tp-size|tensor-parallel-size)=([0-9]+)$" . "${2}" -}}
{{- if and $gpus (regexMatch "^[0-9]+$" $ranks) (gt (int $ranks) $gpus) -}}
{{- fail (printf "generator.sglang.sidecar.args has %s with %d GPUs in its resources: raise the limits, or lower the flag" . $gpus) -}}
{{- end -}}
{{- end -}}
{{- end -}}
