//! Frames of a control connection: read, decode, and send again.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tests::fuzz::frames(bytes));
