//! Indices of checkpoints: read, cover, write.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tests::fuzz::metadata(bytes));
