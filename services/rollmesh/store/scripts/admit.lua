#!lua
-- Opens groups with their pending trajectories and advances the cursor.
-- ARGV: leader, nonce, epoch and index before, epoch and index after, groups, then per group:
--   id, needed, launched, epoch, index, prompt bytes ('' when it was uploaded under its own key, with the nonce), prompt
--   id ('' without history), expected tokens ('' when unknown), start rank ('' for admission order), domain ('' without
--   one, or without history), plan of the first round (JSON; '' for a group of one round).
-- Returns the number of opened groups; groups that are queued, trained or dropped are skipped.
require_leader(ARGV[1])
refuse_while_recovering('admit')
local meta = call('HMGET', K.meta, 'admit_nonce', 'admit_count', 'cursor_epoch', 'cursor_index', 'admission_seq',
  'floor_epoch', 'floor_index')
if meta[1] == ARGV[2] then return tonumber(meta[2]) end
if meta[3] ~= ARGV[3] or meta[4] ~= ARGV[4] then
  fail('CONFLICT', 'the cursor is at (' .. meta[3] .. ', ' .. meta[4] .. '), not at (' .. ARGV[3] .. ', ' .. ARGV[4] .. ')')
end
local floor_epoch, floor_index = tonumber(meta[6] or '-1'), tonumber(meta[7] or '-1')

local function known(gid, epoch, index)
  if epoch < floor_epoch or (epoch == floor_epoch and index <= floor_index) then return true end
  return call('EXISTS', group_key(gid)) == 1 or call('ZSCORE', K.tombstones, gid) or call('HEXISTS', K.cut, gid) == 1
    or call('HEXISTS', K.returning, gid) == 1
end

local function upload_of(gid)
  return upload_key(gid .. ':' .. ARGV[2])
end

-- Every group is checked before the first write, so a lost upload leaves the whole call without effect.
local new, named = {}, {}
for group = 0, tonumber(ARGV[7]) - 1 do
  local at = 8 + group * 11
  local gid, prompt = ARGV[at], ARGV[at + 5]
  if not named[gid] and not known(gid, tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4])) then
    if prompt == '' and call('EXISTS', upload_of(gid)) == 0 then fail('UPLOAD_EXPIRED', 'prompt of ' .. gid) end
    named[gid] = true
    new[#new + 1] = {
      id = gid, needed = tonumber(ARGV[at + 1]), launched = tonumber(ARGV[at + 2]), prompt = prompt,
      prompt_id = ARGV[at + 6], expected = ARGV[at + 7], rank = ARGV[at + 8] ~= '' and ARGV[at + 8] or nil,
      domain = ARGV[at + 9], plan = ARGV[at + 10],
    }
  end
end

local sequence, opened = tonumber(meta[5] or '0'), #new
for _, group in ipairs(new) do
  local gid = group.id
  if group.prompt ~= '' then
    call('SET', prompt_key(gid), group.prompt)
  else
    call('RENAME', upload_of(gid), prompt_key(gid))
    call('PERSIST', prompt_key(gid))
  end
  count('prompt_bytes_total', call('STRLEN', prompt_key(gid)))
  sequence = sequence + 1
  call('HSET', group_key(gid), 'index', sequence, 'needed', group.needed, 'launched', group.launched, 'scored', 0,
    'terminal', 0, 'admitted_at', integer(now()))
  if group.launched > group.needed then call('HSET', group_key(gid), 'spare', group.launched - group.needed) end
  if group.prompt_id ~= '' then call('HSET', group_key(gid), 'prompt', group.prompt_id) end
  if group.domain ~= '' then
    call('HSET', group_key(gid), 'domain', group.domain)
    call('HINCRBY', K.domains, group.domain, 1)
  end
  if group.expected ~= '' then call('HSET', group_key(gid), 'expected', group.expected) end
  if group.rank then call('HSET', group_key(gid), 'rank', group.rank) end
  if group.plan ~= '' then begin_rounds(gid, group.needed, group.launched, group.plan) end
  call('ZADD', K.open, sequence, gid)
  local members = {}
  for member = 0, group.launched - 1 do
    members[#members + 1] = start_place(sequence, group.rank, member)
    members[#members + 1] = gid .. '.' .. member
  end
  call('ZADD', K.pending, unpack(members))
end
call('HSET', K.meta, 'cursor_epoch', ARGV[5], 'cursor_index', ARGV[6], 'admission_seq', sequence,
  'admit_nonce', ARGV[2], 'admit_count', opened)
if opened > 0 then call('HSET', K.meta, 'start_ranked', new[1].rank and 1 or 0) end
count('admitted_total', opened)
count('prompts_total', opened)
count('skipped_total', tonumber(ARGV[7]) - opened)
flush_counts()
return opened
