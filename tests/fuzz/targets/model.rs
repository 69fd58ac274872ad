//! `model.ron`: parse, elaborate, compile.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tests::fuzz::model(bytes));
