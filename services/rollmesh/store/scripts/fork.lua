#!lua
-- Adds a member to the group of a held trajectory and leases it to the same session: its agent continues with a context
-- that the trajectory does not contain. A group has at most `most_members` members, replacements included, and it needs
-- room in the pool (lib/pool.lua). ARGV: session, trajectory, nonce.
-- Returns a map: `status`, and of a new member `id`, `birth`, `incarnation` and `since`, the time of its lease in ms,
-- and in a run with a history `prompt`, the record of its prompt. A retry with the same nonce gets the same member, also
-- one that has returned to the queue meanwhile and waits for its first token.
local session, parent = ARGV[1], ARGV[2]
require_session(session)
local v = call('HMGET', trajectory_key(parent), 'session', 'state', 'fork_nonce', 'fork')
if v[1] ~= session or v[2] ~= S.leased then return {map = {status = 'lost'}} end
local function forked(id)
  local child = call('HMGET', trajectory_key(id), 'birth', 'since', 'incarnation')
  return {map = {status = 'forked', id = id, birth = tonumber(child[1]), since = tonumber(child[2]),
    incarnation = tonumber(child[3] or '0'), prompt = record_name(id)}}
end
local earlier = v[3] == ARGV[3] and v[4]
if earlier then
  local child = call('HMGET', trajectory_key(earlier), 'session', 'state')
  if child[1] == session and child[2] == S.leased then return forked(earlier) end
end
if recovering() then return {map = {status = 'paused'}} end
local meta = call('HMGET', K.meta, 'user_paused', 'policy_version', 'launcher_paused')
local paused = call('HGET', K.desired, 'paused')
if meta[1] == '1' or meta[3] == '1' or paused == '1' then return {map = {status = 'paused'}} end
if tonumber(call('HGET', K.counts, 'leased') or '0') >= leasable() then return {map = {status = 'pool_full'}} end
local group = load_group(group_of(parent))
if not group then return {map = {status = 'lost'}} end
local waits = earlier and call('ZSCORE', K.pending, earlier)
if not waits and group.launched >= most_members(group.needed) then return {map = {status = 'group_full'}} end
local id, attempts = earlier, 1
if waits then
  call('ZREM', K.pending, id)
  attempts = tonumber(call('HGET', trajectory_key(id), 'attempts') or '0') + 1
else
  touch(group)
  id, group.launched = group.id .. '.' .. group.launched, group.launched + 1
  call('HSET', trajectory_key(id), 'birth', math.max(0, tonumber(meta[2] or '0')), 'since', now(),
    'incarnation', group.incarnation or '0', 'is_fork', 1)
  call('HSET', trajectory_key(parent), 'fork_nonce', ARGV[3], 'fork', id)
  count('forks_total', 1)
end
call('HSET', trajectory_key(id), 'state', S.leased, 'session', session, 'attempts', attempts, 'mark', 0, 'tokens', 0)
call('SADD', held_key(session), id)
count('leased', 1)
count('leases_total', 1)
flush_groups()
flush_counts()
return forked(id)
