#!lua flags=allow-oom
-- Deletes a dead letter and its payload. ARGV: trajectory id. Returns 1 when it existed.
return forget_letter(ARGV[1])
