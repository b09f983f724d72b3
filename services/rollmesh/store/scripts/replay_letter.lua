#!lua
-- Replays a dead letter as a new group with replay_of; a repeated call returns the same group. The group waits for the
-- leader (admit_replays), which raises the oldest version to start on first. ARGV: trajectory id, needed.
-- Returns the group id.
local id = ARGV[1]
local letter = call('HMGET', letter_key(id), 'group', 'replayed_as', 'domain')
if not letter[1] then fail('CONFLICT', 'no dead letter ' .. id) end
if letter[2] and letter[2] ~= '' then return letter[2] end
refuse_while_recovering('replay')
if call('EXISTS', letter_prompt_key(id)) == 0 then fail('CONFLICT', 'dead letter ' .. id .. ' has lost its prompt') end
-- A number that no replay has had: batch files keep group ids longer than tombstones do.
local gid
repeat
  gid = letter[1] .. 'r' .. call('HINCRBY', K.meta, 'replay_seq', 1)
until call('EXISTS', group_key(gid)) == 0 and not call('ZSCORE', K.tombstones, gid)
  and call('HEXISTS', K.cut, gid) == 0
call('COPY', letter_prompt_key(id), prompt_key(gid))
call('HSET', letter_key(id), 'replayed_as', gid)
-- Counted with its number: after a restore of Redis, save_outcomes tells by the number which draws are counted.
if letter[3] then call('HINCRBY', K.domains, letter[3], 1) end
call('HSET', K.replays, gid, ARGV[2] .. ' ' .. id)
return gid
