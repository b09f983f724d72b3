{{/* Values of which one would be ignored beside another one. */}}
{{- define "rollmesh.refuseIgnoredValues" -}}
{{- $redis := .Values.redis -}}
{{- if and $redis.enabled $redis.externalUrl -}}
{{- fail (printf "redis.externalUrl=%s with redis.enabled=true: a run has one Redis; set redis.enabled=false to use yours, or leave redis.externalUrl empty" $redis.externalUrl) -}}
{{- end -}}
{{- $checkpoints := .Values.checkpoints -}}
{{- if and $checkpoints.url $checkpoints.existingClaim -}}
{{- fail (printf "checkpoints.url=%s with checkpoints.existingClaim=%s: checkpoints have one place; leave one of them empty" $checkpoints.url $checkpoints.existingClaim) -}}
{{- end -}}
{{- $claim := not (or $checkpoints.url $checkpoints.existingClaim) -}}
{{- $theirs := ternary "" $redis.externalUrl $redis.enabled -}}
{{- $sglang := include "rollmesh.sglangPlace" . -}}
{{- range list
  (list "redis.tlsSecret" $redis.tlsSecret (hasPrefix "rediss" $theirs) "a redis.externalUrl that begins with rediss")
  (list "redis.clientCertificate" $redis.clientCertificate $redis.tlsSecret "redis.tlsSecret, which has the certificate")
  (list "redis.externalSentinelPassword" $redis.externalSentinelPassword (contains "+sentinel:" $theirs) "a redis.externalUrl with +sentinel")
  (list "redis.extraConfig" $redis.extraConfig $redis.enabled "redis.enabled=true")
  (list "checkpoints.cacheVolume" $checkpoints.cacheVolume $checkpoints.url "checkpoints.url")
  (list "checkpoints.storageClassName" $checkpoints.storageClassName $claim "a claim of the chart: checkpoints.url or checkpoints.existingClaim is set")
  (list "generator.sglang.sidecar.enabled" .Values.generator.sglang.sidecar.enabled $sglang "run.generator.engine=sglang")
  (list "gateway.ingress.enabled" .Values.gateway.ingress.enabled .Values.gateway.enabled "gateway.enabled=true")
  (list "gateway.httpRoute.enabled" .Values.gateway.httpRoute.enabled .Values.gateway.enabled "gateway.enabled=true")
-}}
{{- if and (index . 1) (not (index . 2)) -}}
{{- fail (printf "%s=%v has no effect without %s: give both or none" (index . 0) (index . 1) (index . 3)) -}}
{{- end -}}
{{- end -}}
{{- $tls := .Values.security.tls -}}
{{- if and $tls.existingSecret $tls.certManager.issuerName -}}
{{- fail (printf "security.tls.existingSecret=%s with security.tls.certManager.issuerName=%s: certificates come from one of them; leave the other empty" $tls.existingSecret $tls.certManager.issuerName) -}}
{{- end -}}
{{- if and .Values.monitoring.podMonitor.enabled .Values.monitoring.serviceMonitor.enabled -}}
{{- fail "monitoring.podMonitor.enabled and monitoring.serviceMonitor.enabled: Prometheus would scrape each pod twice and sums would double; turn one of them off" -}}
{{- end -}}
{{- $teachers := include "rollmesh.teachers" . | splitList " " | compact -}}
{{- range $name, $_ := .Values.teachers -}}
{{- if not (has (printf "teacher-%s" $name) $teachers) -}}
{{- fail (printf "teachers.%s has no effect without a teacher run.teachers.%s that has no address: give both or none" $name $name) -}}
{{- end -}}
{{- end -}}
{{- range $teachers -}}
{{- $service := include "rollmesh.componentName" (list $ .) -}}
{{- if or (gt (len $service) 63) (not (regexMatch "^[a-z0-9-]*[a-z0-9]$" $service)) -}}
{{- fail (printf "run.teachers.%s: its Service would be called %s: up to 63 lower-case letters, digits and inner hyphens; rename the teacher" (trimPrefix "teacher-" .) $service) -}}
{{- end -}}
{{- end -}}
{{- range $component := concat (list "rollout" "generator" "reward") $teachers -}}
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
{{- range list
  (list "resources.limits.memory" (dig "limits" "memory" "" $redis.resources))
  (list "persistence.size" (ternary $redis.persistence.size "" $redis.persistence.enabled))
-}}
{{- if and $redis.enabled (last .) (le (include "rollmesh.bytes" (last .) | int64) (include "rollmesh.bytes" $redis.maxmemory | int64)) -}}
{{- fail (printf "redis.%s=%v has no room for redis.maxmemory=%s and more: raise it, or lower redis.maxmemory" (first .) (last .) $redis.maxmemory) -}}
{{- end -}}
{{- end -}}
{{- include "rollmesh.refuseWrongGpus" . -}}
{{- include "rollmesh.refuseOnePortTwice" . -}}
{{- end -}}

{{/* Bytes of a size in the units of Kubernetes (Gi is 1024^3, G 1000^3) or Redis (gb is 1024^3, g 1000^3). */}}
{{- define "rollmesh.bytes" -}}
{{- $size := . | toString | lower -}}
{{- $unit := regexFind "[a-z]+$" $size | replace "b" "i" -}}
{{- $bytes := trimSuffix (regexFind "[a-z]+$" $size) $size | float64 -}}
{{- $factor := ternary 1024 1000 (hasSuffix "i" $unit) -}}
{{- range until (index (dict "k" 1 "m" 2 "g" 3 "t" 4 "p" 5 "e" 6) (trimSuffix "i" $unit) | int) -}}
{{- $bytes = mulf $bytes $factor -}}
{{- end -}}
{{- int64 $bytes -}}
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
{{- $flag := regexFind "--(tp|tp-size|tensor-parallel-size)[= ][0-9]+" (join " " $sidecar.args) -}}
{{- if and $gpus (gt (regexFind "[0-9]+$" $flag | int) $gpus) -}}
{{- fail (printf "generator.sglang.sidecar.args has %s with %d GPUs in its resources: raise the limits, or lower the flag" $flag $gpus) -}}
{{- end -}}
{{- end -}}

{{/* Two servers of one pod on one port, of which the second one cannot start. */}}
{{- define "rollmesh.refuseOnePortTwice" -}}
{{- $admin := list "network.adminPort" .Values.network.adminPort -}}
{{- $sglang := list "generator.sglang.sidecar.port" .Values.generator.sglang.sidecar.port -}}
{{- range list
  (list (list "network.grpcPort" .Values.network.grpcPort) $admin)
  (list (list "gateway.port" .Values.gateway.port) $admin)
  (list (list "agents.port" .Values.agents.port) $admin)
  (list (list "trainer.rendezvousPort" .Values.trainer.rendezvousPort) $admin)
  (list $sglang $admin)
  (list $sglang (list "network.grpcPort" .Values.network.grpcPort))
-}}
{{- $one := first . -}}
{{- $other := last . -}}
{{- if eq (last $one | int) (last $other | int) -}}
{{- fail (printf "%s=%v is the port of %s, too, in the same pod: change one of them" (first $one) (last $one) (first $other)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
