#!lua flags=allow-oom
-- uses: adopt core counters history
-- Takes a slice of the outcomes of a batch file: an outcome that was recorded here is saved now. One that Redis has lost
-- is added to the history, unless its group is open or aside here and will end again. `history_row` has the step and the
-- number of rows of a file of which a part is done, so a retry changes nothing.
-- ARGV: trainer, train step, first row of this slice, '1' for the last slice, then (group, outcome) pairs.
-- Returns the number of rows that are done, -1 when the file was done before.
adopt_trainer(ARGV[1])
local meta = call('HMGET', K.meta, 'history_step', 'history_row')
if tonumber(ARGV[2]) <= tonumber(meta[1] or '0') then return -1 end
local step, done = string.match(meta[2] or '', '^(%d+) (%d+)$')
done = step == ARGV[2] and tonumber(done) or 0
if done ~= tonumber(ARGV[3]) then return done end
for at = 5, #ARGV, 2 do
  local gid = string.match(ARGV[at], '^[^~]+')
  local ends_again = call('ZSCORE', K.open, gid) or call('ZSCORE', K.aside, gid)
  if call('HDEL', K.outcomes, ARGV[at]) == 0 and not ends_again then
    add_to_history(ARGV[at + 1])
    local domain = string.match(ARGV[at + 1], '^%S+ %S+ %S+ %S+ %S+ %d+@(%S+)')
    if domain then call('HINCRBY', K.domains, domain, 1) end
    count('outcomes_restored_total', 1)
  end
end
done = done + (#ARGV - 4) / 2
if ARGV[4] == '1' then
  call('HSET', K.meta, 'history_step', ARGV[2])
  call('HDEL', K.meta, 'history_row')
else
  call('HSET', K.meta, 'history_row', ARGV[2] .. ' ' .. integer(done))
end
flush_counts()
return done
