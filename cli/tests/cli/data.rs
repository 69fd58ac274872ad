//! A run that goes on reads the data that its checkpoint names, or says why not.

use std::fs;

use serde_json::Value;

use crate::{Folder, unwrapped};

const RUN: &str = "run model.ron --mesh 2 --format json --save ckpt --save-every 2";

/// A folder with two files of tokens, and a checkpoint of step 2 that was trained on them.
#[track_caller]
fn trained(test: &str) -> Folder {
    let folder = Folder::new(test, &[]);
    let tokens = |seed: u64| -> Vec<u8> {
        let walk = (0..6000).scan(seed, |state, _| {
            *state = (*state * 1_103_515_245 + 12345) % (1 << 31);
            Some((*state >> 16) as u8)
        });
        walk.collect()
    };
    folder.write("a.bin", tokens(1));
    folder.write("b.bin", tokens(2));
    folder.works(&format!("{RUN} --data a.bin b.bin --token-type u8 --steps 2"));
    folder
}

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|it| serde_json::from_str(it).expect("JSON")).collect()
}

fn losses(text: &str) -> Vec<f64> {
    lines(text)
        .iter()
        .filter(|it| it["event"] == "step")
        .filter_map(|it| it["loss"].as_f64())
        .collect()
}

fn warnings(text: &str) -> Vec<String> {
    let all = lines(text).into_iter().filter(|it| it["event"] == "warning");
    all.filter_map(|it| Some(it["message"].as_str()?.to_string())).collect()
}

/// The report of a run that must be refused.
#[track_caller]
fn refused(folder: &Folder, more: &str, parts: &[&str]) {
    let ran = folder.planc(&format!("{RUN} --steps 4 --resume {more}"));
    assert_eq!((ran.code, ran.stdout.as_str()), (1, ""), "{more}: {}", ran.stderr);
    let report: Value = serde_json::from_str(&ran.stderr).expect("one object");
    assert_eq!(report["code"], "PL0527", "{report}");
    let message = report["message"].as_str().expect("text");
    assert!(message.contains("ckpt/step-2` was trained on other data"), "{message}");
    assert!(parts.iter().all(|it| message.contains(it)), "{message}");
    assert!(report["help"].as_str().is_some_and(|it| it.contains("--change-data")), "{report}");
}

#[test]
fn a_run_goes_on_with_the_data_of_its_checkpoint() {
    let folder = trained("data_goes_on");
    let data = "--data a.bin b.bin --token-type u8";
    let straight = losses(
        &folder
            .works(&format!("{RUN} {data} --steps 4 --save straight").replace("--save ckpt ", "")),
    );
    let resumed = folder.works(&format!("{RUN} --steps 4 --resume"));
    assert_eq!(losses(&resumed), straight[2..]);
    assert_eq!(lines(&resumed)[0]["data"], "2 files");
    assert_eq!(warnings(&resumed), Vec::<String>::new());
    // Its own checkpoint names them, too, and so does one that was cut anew.
    folder.works("ckpt reshard ckpt --plan model.ron --mesh 4 -o cut");
    for from in ["ckpt", "cut"] {
        let shown = folder.works(&format!("ckpt show {from}"));
        assert!(shown.contains("planc.data") && shown.contains("b.bin"), "{shown}");
        let text = folder.works(&format!("run model.ron --mesh 4 --steps 5 --load {from}"));
        assert!(text.contains("data: 2 files"), "{text}");
    }
    folder.works("ckpt verify ckpt cut");
}

#[test]
fn data_that_moved_is_found_by_what_it_is() {
    let folder = trained("data_moved");
    fs::create_dir(folder.0.join("new")).expect("a folder");
    for name in ["a.bin", "b.bin"] {
        fs::rename(folder.0.join(name), folder.0.join("new").join(name)).expect("moved");
    }
    refused(&folder, "", &["data_moved/a.bin`, of 6000 bytes, is not there", "b.bin`"]);
    // The type of tokens is that of the checkpoint.
    let ran = folder.works(&format!("{RUN} --steps 4 --resume --data new/a.bin new/b.bin"));
    assert_eq!(warnings(&ran), Vec::<String>::new());
}

#[test]
fn other_data_is_refused_unless_it_is_meant() {
    let folder = trained("data_other");
    refused(&folder, "--data a.bin", &["there are 1 files, and there were 2"]);
    refused(
        &folder,
        "--data b.bin a.bin",
        &["b.bin` has the size of", "a.bin`, and other content"],
    );
    refused(&folder, "--token-type u16", &["tokens are u16, and were u8"]);
    let mut tokens = fs::read(folder.0.join("b.bin")).expect("written");
    tokens[5999] ^= 1;
    folder.write("b.bin", &tokens);
    refused(&folder, "", &["b.bin` has the size of"]);
    tokens.pop();
    folder.write("b.bin", &tokens);
    refused(&folder, "", &["b.bin` has 5999 bytes, and", "had 6000"]);
    // Generated tokens after real data, and other files, have to be asked for, and are said.
    let more = format!("{RUN} --steps 3 --change-data --load ckpt/step-2");
    let said = |more: &str| warnings(&folder.works(more)).join("\n");
    let generated = said(&more);
    assert!(
        generated.contains("sample 16 of other data than before: generated tokens"),
        "{generated}"
    );
    let other = said(&format!("{more} --data a.bin --token-type u8"));
    assert!(other.contains("other data than before"), "{other}");
    let ran = folder.planc(&format!("{RUN} --change-data"));
    assert!(ran.code == 2 && unwrapped(&ran.stderr).contains("--load"), "{}", ran.stderr);
}

#[test]
fn a_run_on_generated_tokens_may_get_data() {
    let folder = trained("data_later");
    folder.works("run model.ron --mesh 2 --steps 1 --save other");
    let line = "run model.ron --mesh 2 --format json --steps 2 --load other";
    assert_eq!(warnings(&folder.works(line)), Vec::<String>::new());
    let said = warnings(&folder.works(&format!("{line} --data a.bin --token-type u8")));
    assert!(said[0].contains("of other data than before, which were generated tokens"), "{said:?}");
    // A sample of another length is another place.
    let ran = folder.works(&format!("{RUN} --steps 3 --load ckpt/step-2 --set sequence=16"));
    assert!(
        warnings(&ran).iter().any(|it| it.contains("a sample has 16 tokens and had 32")),
        "{ran}"
    );
}
