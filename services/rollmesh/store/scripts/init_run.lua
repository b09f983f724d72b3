#!lua flags=allow-oom
-- Writes the limits of a run once; a second start must pass the same limits, but may raise train_steps. Fixed settings
-- (`schedule.<field>`) are text and in K.meta; K.limits has numbers. Every service starts with this script, so it must
-- run when memory is short: memory is freed by training a batch, and the trainer restarts too.
-- A prompt history may begin later: the next batch file is then the first with outcomes. It never ends.
-- ARGV: '1' when a client restores a run that Redis has lost, then (field, value) pairs.
local function place_of(name) return string.find(name, '^schedule%.') and K.meta or K.limits end

local there = call('HGETALL', K.limits)
if #there > 0 then
  local old, changed, refused, history_begins = {}, {}, {}, false
  for at = 1, #there, 2 do old[there[at]] = there[at + 1] end
  for at = 2, #ARGV, 2 do
    local longer = ARGV[at] == 'train_steps' and tonumber(ARGV[at + 1]) > tonumber(old[ARGV[at]] or 0)
    if place_of(ARGV[at]) == K.meta then old[ARGV[at]] = call('HGET', K.meta, ARGV[at]) end
    local history = ARGV[at] == 'keeps_history'
    local begins = history and ARGV[at + 1] == '1' and old[ARGV[at]] ~= '1'
    history_begins = history_begins or begins
    if begins or longer then
      changed[#changed + 1], changed[#changed + 2] = ARGV[at], ARGV[at + 1]
    elseif not history and old[ARGV[at]] ~= ARGV[at + 1] then
      refused[#refused + 1] = ARGV[at] .. ': this run was started with ' .. (old[ARGV[at]] or 'none') .. ', not ' .. ARGV[at + 1]
    end
  end
  if #refused > 0 then fail('CONFLICT', table.concat(refused, '; ')) end
  if history_begins then call('HSET', K.meta, 'history_step', call('HGET', K.meta, 'trained_step')) end
  for at = 1, #changed, 2 do call('HSET', place_of(changed[at]), changed[at], changed[at + 1]) end
  return 0
end
for at = 2, #ARGV, 2 do call('HSET', place_of(ARGV[at]), ARGV[at], ARGV[at + 1]) end
call('HSET', K.meta, 'run_id', server_run_id(), 'trained_step', 0, 'cut_step', 0, 'committed_step', 0,
  'policy_version', -1, 'policy_train_step', 0, 'cursor_epoch', 0, 'cursor_index', 0, 'admission_seq', 0,
  'filtered_in_a_row', 0)
if ARGV[1] == '1' then open_recovery(server_run_id()) end
return 1
