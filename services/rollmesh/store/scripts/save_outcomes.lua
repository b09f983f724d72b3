#!lua flags=allow-oom
-- Takes a slice of the outcomes of a batch file: an outcome that was recorded here is saved now. One that Redis has lost
-- is added to the history, unless its group will end again: it is open, aside or a waiting replay here. `history_row` has
-- the step and the number of rows of a file of which a part is done, so a retry changes nothing.
-- A lost outcome is also that of a lost draw if its group was admitted after the state that Redis has: its position is
-- at the cursor or past it. A group that was drawn before counts in its domain already; a replay has no position, but a
-- number.
-- ARGV: trainer, train step, first row of this slice, '1' for the last slice, run_id of the server that has the batch
-- file, then (group, outcome) pairs. Returns the number of rows that are done, -1 when the file was done before.
require_run()
-- A server that came back since then may have the groups of the file open: it is sent the file first, which ends them.
if ARGV[5] ~= server_run_id() then fail('RECOVERING', 'Redis came back after the batch file was confirmed; retry') end
adopt_trainer(ARGV[1])
local meta = call('HMGET', K.meta, 'history_step', 'history_row', 'cursor_epoch', 'cursor_index', 'replays_before',
  'replay_seq')
if tonumber(ARGV[2]) <= tonumber(meta[1] or '0') then return -1 end
local step, done = string.match(meta[2] or '', '^(%d+) (%d+)$')
done = step == ARGV[2] and tonumber(done) or 0
if done ~= tonumber(ARGV[3]) then return done end
local cursor_epoch, cursor_index = tonumber(meta[3] or '0'), tonumber(meta[4] or '0')
local replays = tonumber(meta[5] or meta[6] or '0')

local function is_lost_draw(name)
  if string.find(name, '~', 1, true) then return false end
  local replay = tonumber(string.match(name, 'r(%d+)$'))
  if replay then return replay > replays end
  local epoch, index = string.match(name, '^e(%d+)%-(%d+)$')
  epoch, index = tonumber(epoch), tonumber(index)
  return not epoch or epoch > cursor_epoch or (epoch == cursor_epoch and index >= cursor_index)
end

-- A group that will end again has an outcome in this file, so the next one is not that of a new draw.
local function will_end_again(gid)
  local replay = call('HGET', K.replays, gid)
  if not (replay or call('ZSCORE', K.open, gid) or call('ZSCORE', K.aside, gid)) then return false end
  local resetting = call('HGET', K.returning, gid)
  if resetting then
    local entry = cjson.decode(resetting)
    entry.ended = 1
    call('HSET', K.returning, gid, cjson.encode(entry))
  elseif replay then
    call('HSET', K.replays, gid, string.match(replay, '^%S+ %S+') .. ' ended')
  elseif call('EXISTS', group_key(gid)) == 1 then
    call('HSET', group_key(gid), 'ended', 1)
  end
  return true
end

for at = 6, #ARGV, 2 do
  if call('HDEL', K.outcomes, ARGV[at]) == 0 and not will_end_again(string.match(ARGV[at], '^[^~]+')) then
    add_to_history(ARGV[at + 1])
    local domain = string.match(ARGV[at + 1], '^%S+ %S+ %S+ %S+ %S+ %d+@(%S+)')
    if domain and is_lost_draw(ARGV[at]) then call('HINCRBY', K.domains, domain, 1) end
    count('outcomes_restored_total', 1)
  end
end
done = done + (#ARGV - 5) / 2
if ARGV[4] == '1' then
  call('HSET', K.meta, 'history_step', ARGV[2])
  call('HDEL', K.meta, 'history_row')
else
  call('HSET', K.meta, 'history_row', ARGV[2] .. ' ' .. integer(done))
end
flush_counts()
return done
