#!lua
-- Begins the next round of an undecided group. ARGV: leader, group, its current round, members needed to end the next
-- round, members to launch, plan (JSON). Returns 1; 0 if the group is not undecided in that round, which a retry finds.
require_leader(ARGV[1])
refuse_while_recovering('extend_group')
local gid = ARGV[2]
local group = undecided_group(gid, ARGV[3])
if not group then return 0 end
local needed, launched, first = tonumber(ARGV[4]), tonumber(ARGV[5]), group.launched
local most = most_members(needed)
if first + launched > most then
  fail('CONFLICT', 'group ' .. gid .. ' has ' .. first .. ' members; ' .. launched .. ' more exceed the limit of ' .. most)
end
local members = {}
for member = first, first + launched - 1 do
  local id = gid .. '.' .. member
  members[#members + 1] = start_place(group.index, group.rank, member)
  members[#members + 1] = id
  -- Before the group began again, another member may have had this id.
  if group.incarnation then
    call('HSET', trajectory_key(id), 'state', S.pending, 'incarnation', group.incarnation)
  end
end
call('ZADD', K.pending, unpack(members))
call('ZREM', K.undecided, gid)
local round = group.round + 1
local fields = {'needed', needed, 'launched', first + launched, 'round', round, 'plan:' .. round, first .. ' ' .. ARGV[6]}
call('HSET', group_key(gid), unpack(fields))
local spare = group.scored + launched - needed
if spare > 0 then
  call('HSET', group_key(gid), 'spare', spare)
else
  call('HDEL', group_key(gid), 'spare')
end
count('groups_extended_total', 1)
count('round_members_total', launched)
flush_counts()
return 1
