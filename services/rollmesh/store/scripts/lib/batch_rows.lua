-- Reads complete groups as (group, admission index, scored members, payload).
-- A member is (number, birth version, finish reason, outcome, reward, kept tokens or '' for all, bytes of its teacher's
-- scores or ''). The payload is the prompt and, of each member, the saved segments and the teacher's scores if any.
-- A payload over the maximum, in tokens of eight bytes, is omitted, so that no call blocks the server for long: the
-- caller reads it with plain commands.
local function batch_rows(gids, left)
  local function payload_of(gid, members, tokens)
    tokens = tokens + call('STRLEN', prompt_key(gid)) / 8
    if tokens > left then return {} end
    left = left - tokens
    local payload = {call('GET', prompt_key(gid))}
    for _, member in ipairs(members) do
      local id = gid .. '.' .. member[1]
      payload[#payload + 1] = call('LRANGE', segments_key(id), 0, -1)
      if member[7] ~= '' then payload[#payload + 1] = call('HGET', trajectory_key(id), 'teacher') end
    end
    return payload
  end

  local rows = {}
  for _, gid in ipairs(gids) do
    local v, members, tokens = call('HMGET', group_key(gid), 'index', 'launched'), {}, 0
    for member = 0, tonumber(v[2]) - 1 do
      local id = gid .. '.' .. member
      local m = call('HMGET', trajectory_key(id), 'state', 'birth', 'finish', 'outcome', 'reward', 'tokens', 'kept',
        'teacher_bytes')
      if m[1] == S.scored then
        members[#members + 1] = {member, m[2], m[3], m[4], m[5], m[7] or '', m[8] or ''}
        tokens = tokens + tonumber(m[6]) + tonumber(m[8] or '0') / 8
      end
    end
    rows[#rows + 1] = {gid, tonumber(v[1]), members, payload_of(gid, members, tokens)}
  end
  return rows
end
