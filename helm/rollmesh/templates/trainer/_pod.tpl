{{/* Name of the trainer's workload. A Job's pods cannot be changed, so a change makes another Job, with a digest of the
     pod in its name; the newer trainer fences the older one, whose next pod ends its Job. */}}
{{- define "rollmesh.trainerName" -}}
{{- $name := include "rollmesh.componentName" (list . "trainer") -}}
{{- if eq .Values.trainer.kind "Job" -}}
{{- $name = include "rollmesh.trainerPod" (list . $name "Never") | sha256sum | trunc 8 | printf "%s-%s" $name -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/* The pod of a trainer, for its Job and its StatefulSet: (list $ $name $restartPolicy), where
     $name-0 is the host name of the first pod. */}}
{{- define "rollmesh.trainerPod" -}}
{{- $root := index . 0 -}}
{{- $uses := list "store" "checkpoints" -}}
{{- $trainer := $root.Values.trainer -}}
{{- $severalRanks := gt (mul (int $trainer.nodes) (int $trainer.processesPerNode)) 1 -}}
{{- if and $severalRanks (eq (dig "trainer" "optimizer" "" $root.Values.run) "adamw_8bit") -}}
{{- fail (printf "trainer.nodes=%v and trainer.processesPerNode=%v with run.trainer.optimizer=adamw_8bit: the 8-bit moments cannot be split over processes; use adamw, whose moments are split, or 1 node with 1 process" $trainer.nodes $trainer.processesPerNode) -}}
{{- end -}}
{{- if and $root.Values.checkpoints.url (gt (int $trainer.nodes) 1) -}}
{{- fail (printf "trainer.nodes=%v needs a checkpoint volume, not checkpoints.url: the ranks write one state together" $trainer.nodes) -}}
{{- end -}}
metadata:
  labels:
    {{- include "rollmesh.podLabels" (list $root "trainer") | nindent 4 }}
  annotations:
    {{- include "rollmesh.podAnnotations" (list $root "trainer") | nindent 4 }}
spec:
  {{- include "rollmesh.podSettings" (list $root "trainer") | nindent 2 }}
  {{- with index . 2 }}
  restartPolicy: {{ . }}
  {{- end }}
  # Every step ends in a committed state; a step that SIGTERM interrupts is replayed from its batch file.
  terminationGracePeriodSeconds: {{ include "rollmesh.gracePeriodSeconds" $root }}
  initContainers:
    {{- if eq $trainer.kind "Job" }}
    {{- include "rollmesh.newestContainer" (list $root (index . 1)) | nindent 4 }}
    {{- end }}
    {{- include "rollmesh.validateContainer" (list $root "trainer" $uses) | nindent 4 }}
  containers:
    - name: trainer
      image: {{ include "rollmesh.image" (list $root $trainer.image) | quote }}
      imagePullPolicy: {{ $trainer.image.pullPolicy | quote }}
      {{- if $severalRanks }}
      command: ["python3", "-P", "-m", "rollmesh.trainer.torchrun", "--no-python", "python3", "-u", "-P"]
      args: ["-m", "rollmesh.cli.main", "trainer", "/etc/rollmesh/run/run.yaml"]
      {{- else }}
      args: ["trainer", "/etc/rollmesh/run/run.yaml"]
      {{- end }}
      env:
        {{- include "rollmesh.env" (list $root "trainer") | nindent 8 }}
        {{- include "rollmesh.storeEnv" $root | nindent 8 }}
        {{- include "rollmesh.checkpointEnv" $root | nindent 8 }}
        {{- if $severalRanks }}
        # torchrun reads its flags from PET_*. All pods rendezvous at the first one; a rank that fails restarts all ranks.
        - name: PET_NNODES
          value: {{ $trainer.nodes | quote }}
        - name: PET_NPROC_PER_NODE
          value: {{ $trainer.processesPerNode | quote }}
        - name: PET_RDZV_BACKEND
          value: c10d
        - name: PET_RDZV_ENDPOINT
          value: {{ printf "%s-0:%v" (index . 1) $trainer.rendezvousPort | quote }}
        - name: PET_LOCAL_ADDR
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        - name: PET_RDZV_ID
          value: {{ include "rollmesh.runName" $root | quote }}
        - name: PET_MAX_RESTARTS
          value: {{ $trainer.maxRestarts | quote }}
        {{- end }}
        {{- with $trainer.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - name: rendezvous
          containerPort: {{ $trainer.rendezvousPort }}
        {{- include "rollmesh.ports" (list $root "admin") | trim | nindent 8 }}
      {{- include "rollmesh.probes" (list $root "trainer" "http") | nindent 6 }}
      {{- include "rollmesh.containerSecurityContext" $root | nindent 6 }}
      resources:
        {{- toYaml $trainer.resources | nindent 8 }}
      volumeMounts:
        {{- include "rollmesh.volumeMounts" (list $root "trainer" $uses) | nindent 8 }}
        {{- if $trainer.sharedMemory }}
        - name: shared-memory
          mountPath: /dev/shm
        {{- end }}
  volumes:
    {{- include "rollmesh.volumes" (list $root "trainer" $uses) | nindent 4 }}
    {{- if $trainer.sharedMemory }}
    - name: shared-memory
      emptyDir: {medium: Memory, sizeLimit: {{ $trainer.sharedMemory | quote }}}
    {{- end }}
{{- end -}}

{{/* The init container that ends the Job when the release has a newer one. An upgrade that stops half-way leaves both,
     whose trainers would end each other's sessions for ever. The ConfigMap names the newest one, because a pod of an
     older Job sees its new contents: (list $ $name). */}}
{{- define "rollmesh.newestContainer" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
- name: newest
  image: {{ include "rollmesh.image" (list $root $root.Values.trainer.image) | quote }}
  imagePullPolicy: {{ $root.Values.trainer.image.pullPolicy | quote }}
  command: ["sh", "-c"]
  args:
    - |
      grep -qx {{ $name }} /etc/rollmesh/run/trainer-job && exit 0
      echo "Job {{ $name }} ends: the newest trainer of this release is Job $$(cat /etc/rollmesh/run/trainer-job)."
      echo "Delete this Job before an upgrade or a rollback that goes back to it."
      exit 2
  {{- include "rollmesh.containerSecurityContext" $root | nindent 2 }}
  {{- with $root.Values.trainer.validateResources | default $root.Values.validateResources }}
  resources:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  volumeMounts:
    - name: run-file
      mountPath: /etc/rollmesh/run
      readOnly: true
    - name: tmp
      mountPath: /tmp
{{- end -}}
