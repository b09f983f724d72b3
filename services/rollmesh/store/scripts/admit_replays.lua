#!lua
-- uses: core fence replay roles
-- Opens waiting groups of replayed dead letters, the oldest request first. ARGV: leader, maximum number of groups.
-- Returns the number of opened groups.
require_leader(ARGV[1])
refuse_while_recovering('admit')
local waiting = call('HKEYS', K.replays)
table.sort(waiting, function(a, b)
  return tonumber(string.match(a, '%d+$')) < tonumber(string.match(b, '%d+$'))
end)
local opened = 0
for _, gid in ipairs(waiting) do
  if opened >= tonumber(ARGV[2]) then break end
  -- The third word is that of save_outcomes.
  local needed, letter, ended = string.match(call('HGET', K.replays, gid), '^(%d+) (%S+) ?(%S*)$')
  open_replay(gid, letter, needed)
  if ended ~= '' then call('HSET', group_key(gid), 'ended', 1) end
  call('HDEL', K.replays, gid)
  opened = opened + 1
end
return opened
