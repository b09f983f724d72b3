-- Turns a trajectory into a dead letter with its payload; it counts as a member without a score.
local function bury(id, reason)
  local gid = group_of(id)
  local v = call('HMGET', trajectory_key(id), 'attempts', 'tokens', 'links', 'birth')
  call('HSET', letter_key(id), 'group', gid, 'reason', reason, 'attempts', v[1] or 0, 'tokens', v[2] or 0,
    'links', v[3] or '', 'birth', v[4] or 0, 'time', now())
  if call('EXISTS', segments_key(id)) == 1 then call('RENAME', segments_key(id), letter_segments_key(id)) end
  call('COPY', prompt_key(gid), letter_prompt_key(id), 'REPLACE')
  call('ZADD', K.letters, now(), id)
  local bytes = letter_bytes(id, v[2] or 0)
  count_letter_bytes(id, bytes)
  call('HSET', letter_key(id), 'bytes', bytes)
  forget_surplus_letters(id)
  local group = load_group(gid)
  if group and group.prompt then call('HSET', letter_key(id), 'prompt', group.prompt) end
  if group and group.domain then call('HSET', letter_key(id), 'domain', group.domain) end
  if group and group.rank then call('HSET', letter_key(id), 'rank', group.rank) end
  call('HSET', trajectory_key(id), 'state', S.dead)
  call('HDEL', trajectory_key(id), 'links', 'step', 'session', 'snapshot', 'has_snapshot')
  waste(id, R.dead, v[2] or 0)
  count('dead', 1)
  count('dead_total', 1)
  if group then
    member_without_score(group, id)
    settle(group)
  end
end
