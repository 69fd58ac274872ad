//! Errors and warnings for programs, and what shells and `man` are given.

use serde_json::{Value, json};

use crate::Folder;

/// Lines of JSON.
#[track_caller]
fn lines(text: &str) -> Vec<Value> {
    text.lines()
        .map(|it| serde_json::from_str(it).unwrap_or_else(|e| panic!("{e}: {it}")))
        .collect()
}

#[test]
fn an_error_has_its_place() {
    let folder = Folder::new("message_error", &[("kv_heads: 2", "kv_head: 2")]);
    for format in ["text", "json"] {
        let line = format!("compile model.ron --mesh 2 --format {format} --message-format json");
        let ran = folder.planc(&line);
        assert_eq!((ran.code, ran.stdout.as_str()), (1, ""));
        let all = lines(&ran.stderr);
        let model = folder.read("model.ron");
        let start = model.find("kv_head").expect("it is there");
        let at = &all[0]["spans"][0];
        assert_eq!(
            (all.len(), &all[0]["level"], &all[0]["code"]),
            (1, &json!("error"), &json!("PL0102"))
        );
        assert_eq!(all[0]["help"], "did you mean `kv_heads`?");
        assert_eq!((&at["file"], &at["byte_start"]), (&json!("model.ron"), &json!(start)));
        let line = model[..start].matches('\n').count();
        assert_eq!(at["line"], line + 1);
        assert_eq!(at["text"], model.lines().nth(line).expect("it has so many"));
        let column =
            model.lines().nth(line).and_then(|it| it.find("kv_head")).expect("it is there");
        assert_eq!(at["column"], column + 1);
        let text = |byte: &Value| byte.as_u64().expect("a number") as usize;
        assert_eq!(&model[text(&at["byte_start"])..text(&at["byte_end"])], "kv_head");
    }
    // The other way round: results for programs, errors for people.
    let ran = folder.planc("compile model.ron --mesh 2 --format json --message-format text");
    assert!(ran.stderr.starts_with("error[PL0102]"), "{}", ran.stderr);
}

/// 6 KV heads of 8 rows over 4 ranks: shards of different sizes.
#[test]
fn lints_are_warnings() {
    let folder = Folder::new("message_lint", &[("vocab: 256", "vocab: 250")]);
    let line = "compile model.ron --mesh 4 --message-format json";
    let ran = folder.planc(line);
    assert_eq!(ran.code, 0);
    let all = lines(&ran.stderr);
    assert!(!all.is_empty());
    assert!(all.iter().all(|it| it["level"] == "warning" && it["code"].is_string()), "{all:?}");
    assert_eq!(all[0]["code"], "uneven");
    // One that is denied is the error.
    let ran = folder.planc(&format!("{line} --deny uneven"));
    let last = lines(&ran.stderr).pop().expect("an error");
    assert_eq!((ran.code, &last["level"], &last["code"]), (1, &json!("error"), &json!("PL0611")));
}

#[test]
fn dumps_and_times_are_notes() {
    let folder = Folder::new("message_note", &[]);
    let line = "compile model.ron --mesh 2 -q --dump-ir-after cse,dce --emit plan --time-passes";
    let text = folder.planc(line);
    let ran = folder.planc(&format!("{line} --message-format json"));
    assert_eq!((ran.code, &ran.stdout), (0, &text.stdout));
    let all = lines(&ran.stderr);
    assert!(all.iter().all(|it| it["level"] == "note"), "{all:?}");
    let (times, dumps) = all.split_last().expect("three notes");
    let passes: Vec<&Value> = dumps.iter().map(|it| &it["details"]["pass"]).collect();
    assert_eq!(passes, ["cse", "dce"]);
    for it in dumps {
        let ir = it["details"]["ir"].as_str().expect("a program");
        assert!(ir.starts_with("graph @") && text.stderr.contains(ir), "{ir}");
    }
    assert!(times["details"]["time_ms"]["passes"]["cse"].is_number(), "{times}");
}

#[test]
fn usage_is_an_error_too() {
    let folder = Folder::new("message_usage", &[]);
    let ran = folder.planc("compile model.ron --mehs 2 --message-format json");
    assert_eq!(ran.code, 2);
    let all = lines(&ran.stderr);
    assert_eq!(all.len(), 1);
    assert!(all[0]["message"].as_str().expect("a text").contains("--mehs"), "{all:?}");
    let ran = folder.planc("compile model.ron --mehs 2");
    assert!(ran.code == 2 && ran.stderr.starts_with("error: "), "{}", ran.stderr);
}

#[test]
fn completions_know_commands_and_options() {
    let folder = Folder::new("completions", &[]);
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let text = folder.works(&format!("completions {shell}"));
        for word in ["reshard", "prefetch-forward", "message-format"] {
            assert!(text.contains(word), "{shell} does not know {word}");
        }
    }
    folder.write("planc.bash", folder.works("completions bash"));
    let script = "source ./planc.bash && COMP_WORDS=(planc dif) COMP_CWORD=1 && _planc planc dif planc && \
                  echo ${COMPREPLY[@]}";
    let bash =
        std::process::Command::new("bash").args(["-c", script]).current_dir(&folder.0).output();
    let bash = bash.expect("bash starts");
    assert_eq!(String::from_utf8_lossy(&bash.stdout), "diff\n", "{bash:?}");
}

#[test]
fn a_page_for_each_command() {
    let folder = Folder::new("man", &[]);
    assert!(folder.works("man").contains(".TH planc 1"));
    assert_eq!(folder.works("man pages/man1"), "");
    for (page, word) in
        [("planc", "diff"), ("planc-run", "log\\-every"), ("planc-ckpt-ls", "checkpoint")]
    {
        let text = folder.read(&format!("pages/man1/{page}.1"));
        assert!(text.contains(word), "{page} does not say {word}");
    }
}
