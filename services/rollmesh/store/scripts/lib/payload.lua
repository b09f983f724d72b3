-- Lua unpacks at most 8,000 values and fails after earlier writes; a long trajectory has more values.
local SLICE = 4000
local function in_slices(words, hand_on)
  for at = 1, #words, SLICE do hand_on(unpack(words, at, math.min(at + SLICE - 1, #words))) end
end

local function unlink(keys)
  in_slices(keys, function(...) call('UNLINK', ...) end)
end

local function payload_keys(id, links, keys)
  keys[#keys + 1] = segments_key(id)
  for name in string.gmatch(links or '', '%S+') do
    keys[#keys + 1] = chunk_key(id .. ':' .. name)
  end
end
