{{/* Flags of an SGLang sidecar for the adapters of the run: those of lora_options.py, which a generator checks. */}}

{{/* Largest staleness of the run's schedule, as Bounds computes it. */}}
{{- define "rollmesh.maxStaleness" -}}
{{- $schedule := dig "schedule" dict (include "rollmesh.run" . | fromYaml) -}}
{{- $name := default "copris" (get $schedule "preset") -}}
{{- $presets := .Files.Get "files/schedules.yaml" | fromYaml -}}
{{- if not (hasKey $presets $name) -}}
{{- fail (printf "run.schedule.preset=%s is unknown; use one of %s" $name (keys $presets | sortAlpha | join ", ")) -}}
{{- end -}}
{{- $preset := get $presets $name -}}
{{- $window := get $schedule "window_groups" -}}
{{- if not (kindIs "invalid" (dig "max_staleness" nil $schedule)) -}}
{{- int $schedule.max_staleness -}}
{{- else if and $preset.staleness_follows_window $window -}}
{{- $batch := dig "groups_per_batch" 16 $schedule -}}
{{- max 0 (sub (ceil (divf $window $batch)) 1) -}}
{{- else -}}
{{- $preset.max_staleness -}}
{{- end -}}
{{- end -}}

{{- define "rollmesh.loraFlags" -}}
{{- $run := include "rollmesh.run" . | fromYaml -}}
{{- $adapter := dig "model" "adapter" nil $run -}}
{{- if kindIs "map" $adapter -}}
{{- /* The kept adapters, the base, and the adapter that the canary scores. */}}
{{- $atOnce := add (include "rollmesh.maxStaleness" .) 4 -}}
- --enable-lora
- --lora-strict-loading
- --max-lora-rank={{ default 16 (get $adapter "rank") }}
- --max-loras-per-batch={{ $atOnce }}
- --max-loaded-loras={{ add $atOnce (dig "generator" "slots" 64 $run) }}
- --lora-target-modules
{{- $target := dig "target" "all_linear" $adapter }}
{{- if kindIs "slice" $target }}
{{- range uniq $target | sortAlpha }}
- {{ . | quote }}
{{- end }}
{{- else if ne (toString $target) "all_linear" }}
{{- fail (printf "run.model.adapter.target=%v is neither all_linear nor a list of layer names; write all_linear, or a list such as [q_proj, v_proj]" $target) }}
{{- else }}
{{- /* The names of the layers are in the model's folder, which a template cannot read. */}}
- all
{{- end }}
{{- end -}}
{{- end -}}
