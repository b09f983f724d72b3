-- An item of append and finish is a head and `elements` segments. The head is JSON: id, incarnation, offset, before,
-- tokens, after, versions, finish, bytes, generator, elements; `before` and `after` are the digests of all tokens up to
-- the offset and up to the end of the item. With `agent` (id and name of an agent's session), the mark of the session
-- follows the segments. Returns the item at an index of ARGV, and the index of the next item.
local function read_item(at)
  local item = cjson.decode(ARGV[at])
  item.first, item.last = at + 1, at + item.elements
  if not item.agent then return item, item.last + 1 end
  item.mark = ARGV[item.last + 1]
  return item, item.last + 2
end

local function read_items(first, number)
  local items, at = {}, first
  for item = 1, number do
    items[item], at = read_item(at)
  end
  return items
end

local lowest_steps = {}
local function lowest_step(versions)
  local lowest = lowest_steps[versions]
  if lowest then return lowest end
  for version in string.gmatch(versions, '%-?%d+') do
    local step = train_step_of(version)
    if not lowest or step < lowest then lowest = step end
  end
  lowest_steps[versions] = lowest
  return lowest
end

-- Name of the chunk that an element links; nil for an inline segment.
local function chunk_of(element)
  if string.byte(element) == 64 then return string.sub(element, 2) end
end

-- Every version and every upload is checked before the first write, so a missing one leaves the whole call without
-- effect.
local function check(items)
  for _, item in ipairs(items) do
    item.step = lowest_step(item.versions)
    for at = item.first, item.last do
      local name = chunk_of(ARGV[at])
      if name and call('EXISTS', chunk_key(item.id .. ':' .. name)) == 0 then
        fail('UPLOAD_EXPIRED', 'segment ' .. name .. ' of ' .. item.id)
      end
    end
  end
end

-- A segment over 64 KB was uploaded under its own key with an expiry; the script that links it removes the expiry.
-- Returns the names of all linked chunks of the trajectory; nil without a new chunk.
local function link_chunks(id, first, last)
  local names
  for at = first, last do
    local name = chunk_of(ARGV[at])
    if name then
      call('PERSIST', chunk_key(id .. ':' .. name))
      names = names or call('HGET', trajectory_key(id), 'links')
      names = names and names .. ' ' .. name or name
    end
  end
  return names
end

-- Writes the tokens of one item if it continues the saved tokens. Field d<n> is the digest of the first n tokens, for
-- every n at which a save ended.
-- Returns status, number of saved tokens, the fields that the caller must write, and the state before.
local function save(session, item)
  local id, offset, tokens = item.id, item.offset, item.tokens
  local v = call('HMGET', trajectory_key(id), 'session', 'state', 'tokens', 'step', 'incarnation', 'd' .. offset,
    'd' .. (offset + tokens))
  if v[1] ~= session or (v[2] ~= S.leased and v[2] ~= S.finished) then return LOST, 0 end
  local saved = tonumber(v[3])
  local continues = item.incarnation == (v[5] or '0') and item.before == (v[6] or item.before)
  if not continues or offset > saved then return REFUSED, saved, nil, v[2] end
  if v[2] == S.finished or offset < saved then
    local same = item.after == v[7] or (not v[7] and tokens == 0 and offset == saved)
    return same and DUPLICATE or REFUSED, saved, nil, v[2]
  end
  if item.last < item.first then return SAVED, saved, {}, v[2] end
  local names = link_chunks(id, item.first, item.last)
  -- Lua unpacks at most 8,000 values and fails after earlier writes.
  for at = item.first, item.last, 4000 do
    call('RPUSH', segments_key(id), unpack(ARGV, at, math.min(at + 3999, item.last)))
  end
  local fields = {'tokens', saved + tokens, 'd' .. (saved + tokens), item.after}
  if names then
    fields[5], fields[6] = 'links', names
  end
  if item.step and (not v[4] or item.step < tonumber(v[4])) then
    fields[#fields + 1] = 'step'
    fields[#fields + 1] = item.step
    lower_step(load_group(group_of(id)), item.step, id)
  end
  -- Policy version of the newest tokens, by which give_back dates a rest, and their generator, for display.
  local version = string.match(item.versions, '%-?%d+$')
  if version then
    fields[#fields + 1] = 'version'
    fields[#fields + 1] = version
  end
  if item.generator ~= '' then
    fields[#fields + 1] = 'generator'
    fields[#fields + 1] = item.generator
  end
  count('saved_tokens_total', tokens)
  count('saved_bytes_total', item.bytes)
  return SAVED, saved + tokens, fields, v[2]
end
