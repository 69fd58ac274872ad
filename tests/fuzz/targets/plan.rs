//! Plan text and IR: parse, verify or prove, print.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tests::fuzz::plan(bytes));
