#!lua flags=allow-oom
-- Drops all open and ready groups, oldest first, one slice per call; a group that was set aside has no tokens and stays.
-- The first call with a nonce reverts a cut without a confirmed batch file and stores the newest admission index: groups
-- up to it belong to the abandoned branch. While the index is stored nothing is cut; the last call deletes it.
-- ARGV: trainer, slice size, nonce of the rollback. Returns the number of dropped groups, and 1 while another call is
-- needed.
require_trainer(ARGV[1])
local meta = call('HMGET', K.meta, 'abandon_nonce', 'abandoned_to', 'admission_seq', 'trained_step', 'cut_step')
local newest = meta[2]
if meta[1] ~= ARGV[3] then
  newest = meta[3]
  call('HSET', K.meta, 'abandon_nonce', ARGV[3], 'abandoned_to', newest)
  local cut = meta[5]
  if cut ~= meta[4] and not call('HGET', batch_key(cut), 'digest') then
    for _, gid in ipairs(call('LRANGE', batch_groups_key(cut), 0, -1)) do
      local v = call('HMGET', group_key(gid), 'index', 'step', 'tokens')
      call('HDEL', K.cut, gid)
      call('ZADD', K.ready, v[1], gid)
      call('ZADD', K.ready_steps, v[2] or '+inf', gid)
      call('ZADD', K.ready_tokens, v[3] or 0, gid)
    end
    call('UNLINK', batch_groups_key(cut), K.cuts)
    call('HSET', K.meta, 'cut_step', meta[4])
    return {0, 1}
  end
elseif not newest then
  return {0, 0}
end
local slice, dropped = tonumber(ARGV[2]), 0
for _, queue in ipairs({K.open, K.ready}) do
  if dropped < slice then
    for _, gid in ipairs(call('ZRANGE', queue, '-inf', newest, 'BYSCORE', 'LIMIT', 0, slice - dropped)) do
      local group = load_group(gid)
      if group then drop_group(group, R.rolled_back) else drop_returning(gid, R.rolled_back) end
      dropped = dropped + 1
    end
  end
end
if dropped < slice then call('HDEL', K.meta, 'abandoned_to') end
flush_counts()
return {dropped, dropped < slice and 0 or 1}
