#!lua flags=allow-oom
-- Completes a re-assertion. ARGV: trainer, committed step, trained step, newest batch file, epoch and index of the
-- trainer's copy of the cursor, run_id of the server that was sent the batch files, then (version, train step, path,
-- digest) per policy, ascending.
require_run()
-- A server that came back since then may have lost the batch files: with their steps trained, it would never get them.
if ARGV[7] ~= server_run_id() then fail('RECOVERING', 'Redis came back again during the re-assertion; retry') end
adopt_trainer(ARGV[1])
local meta = call('HMGET', K.meta, 'trained_step', 'cut_step', 'policy_version', 'committed_step', 'cursor_epoch',
  'cursor_index')
local trained = math.max(tonumber(meta[1]), tonumber(ARGV[3]))
local cut = math.max(tonumber(meta[2]), tonumber(ARGV[4]), trained)
call('HSET', K.meta, 'trained_step', trained, 'cut_step', cut,
  'committed_step', math.max(tonumber(meta[4]), tonumber(ARGV[2])))
if cut > tonumber(meta[2]) then call('XADD', K.cuts, cut .. '-0', 'groups', 0) end
local highest = tonumber(meta[3])
for at = 8, #ARGV, 4 do
  local version = tonumber(ARGV[at])
  if version > highest then
    add_policy(ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3])
    highest = version
  end
end
-- The cursor of the restored state stays: every position below it is queued, trained or dropped, and the positions
-- between it and the trainer's copy are admitted again unless a batch file contains them. No position is lost.
local behind = tonumber(ARGV[5]) > tonumber(meta[5])
  or (ARGV[5] == meta[5] and tonumber(ARGV[6]) > tonumber(meta[6]))
if behind then
  call('XADD', K.ledger, 'MAXLEN', '~', 100000, '*', 'group', '', 'reason', 'readmitted', 'tokens', 0, 'decile', 0,
    'from', meta[5] .. '-' .. meta[6], 'to', ARGV[5] .. '-' .. ARGV[6])
end
call('HSET', K.meta, 'reasserted', '1')
call('HDEL', K.meta, 'replays_before')
recovering()
return {trained, cut}
