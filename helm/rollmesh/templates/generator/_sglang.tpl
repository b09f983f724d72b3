{{/* An SGLang server in a separate container: the native sidecar of a generator, or a rank on another node. */}}

{{- define "rollmesh.sglangKey" -}}
valueFrom:
  secretKeyRef:
    name: {{ include "rollmesh.secretName" . | quote }}
    key: {{ .Values.secrets.keys.sglangAdminKey | quote }}
{{- end -}}

{{/* Everything of the container but its name: (list $ $kind "leader" | "worker"). The flags are those of docs/sglang.md. */}}
{{- define "rollmesh.sglangServer" -}}
{{- $root := index . 0 -}}
{{- $multinode := eq (index . 1) "LeaderWorkerSet" -}}
{{- $run := include "rollmesh.run" $root | fromYaml -}}
{{- $sidecar := $root.Values.generator.sglang.sidecar -}}
{{- $model := dig "model" "path" "" $run -}}
{{- if hasPrefix "recipe:" $model -}}
{{- fail (printf "run.model.path=%s: the SGLang image has no recipes; give a folder of model.existingClaim" $model) -}}
{{- end -}}
image: {{ include "rollmesh.image" (list $root $sidecar.image) | quote }}
imagePullPolicy: {{ $sidecar.image.pullPolicy | quote }}
# Kubernetes makes $(...) of $$(...).
command:
  - sh
  - -ec
  - |
    key=$$({{ include "rollmesh.oneLine" "SGLANG_KEY" }})
    exec "$0" -m sglang.launch_server --api-key="$key" --admin-api-key="$key" "$@"
  - python3
args:
  - --model-path={{ $model }}
  - --host=127.0.0.1
  - --port={{ $sidecar.port }}
  - --dtype={{ dig "model" "dtype" "float32" $run }}
  - --context-length={{ add (dig "generator" "max_context_tokens" 2048 $run) 8 }}
  # Eight more than slots: a canary must not wait for a call to end.
  - --max-running-requests={{ add (dig "generator" "slots" 64 $run) 8 }}
  {{- with dig "generator" "kv_token_capacity" "" $run }}
  - --max-total-tokens={{ add . 1024 }}
  {{- end }}
  - --log-level-http=warning
  - --skip-tokenizer-init
  - --sleep-on-idle
  {{- if eq (dig "generator" "on_new_version" "interrupt" $run) "keep_kv" }}
  - --disable-overlap-schedule
  - --watchdog-timeout=86400
  {{- end }}
  {{- if $multinode }}
  - --nnodes=$(LWS_GROUP_SIZE)
  - --node-rank=$(LWS_WORKER_INDEX)
  - --dist-init-addr=$(LWS_LEADER_ADDRESS):{{ $root.Values.generator.leaderWorkerSet.port }}
  {{- end }}
  {{- with include "rollmesh.loraFlags" $root }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- range $sidecar.args }}
  - {{ . | quote }}
  {{- end }}
env:
  - name: SGLANG_KEY
    {{- include "rollmesh.sglangKey" $root | nindent 4 }}
  - name: PYTHONSAFEPATH
    value: "1"
  - name: SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN
    value: "1"
  - name: SGLANG_RETURN_ORIGINAL_LOGPROB
    value: "0"
  - name: SGLANG_TIMEOUT_KEEP_ALIVE
    value: "75"
  - name: HOME
    value: /tmp
  {{- $given := list }}
  {{- range $sidecar.extraEnv }}
  {{- $given = append $given .name }}
  {{- end }}
  {{- range list "no_proxy" "NO_PROXY" }}
  {{- if not (has . $given) }}
  - name: {{ . }}
    value: 127.0.0.1,localhost
  {{- end }}
  {{- end }}
  {{- with $sidecar.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- if eq (index . 2) "leader" }}
# On loopback, so the kubelet cannot probe it; /model_info is answered while the server is paused, too.
startupProbe:
  exec: {command: {{ include "rollmesh.sglangProbe" $sidecar }}}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: {{ div (add $sidecar.startupSeconds 9) 10 }}
livenessProbe:
  exec: {command: {{ include "rollmesh.sglangProbe" $sidecar }}}
  periodSeconds: 30
  timeoutSeconds: 20
  failureThreshold: 4
{{- end }}
{{ include "rollmesh.containerSecurityContext" $root }}
resources:
  {{- toYaml $sidecar.resources | nindent 2 }}
volumeMounts:
  - name: tmp
    mountPath: /tmp
  {{- if $root.Values.checkpoints.url }}
  - name: policy-cache
    mountPath: /var/cache/rollmesh
    readOnly: true
  {{- else }}
  - name: shared
    mountPath: /var/lib/rollmesh/shared
    readOnly: true
  {{- end }}
  {{- if $root.Values.model.existingClaim }}
  - name: model
    mountPath: {{ $root.Values.model.mountPath | quote }}
    readOnly: true
  {{- end }}
  {{- if $root.Values.generator.sharedMemory }}
  - name: shared-memory
    mountPath: /dev/shm
  {{- end }}
{{- end -}}

{{- define "rollmesh.sglangProbe" -}}
{{- $code := printf "import os,urllib.request as u; u.urlopen(u.Request('http://127.0.0.1:%v/model_info',headers={'Authorization':'Bearer '+os.environ['SGLANG_KEY'].strip()}),timeout=9)" .port -}}
{{- list "python3" "-c" $code | toJson -}}
{{- end -}}
