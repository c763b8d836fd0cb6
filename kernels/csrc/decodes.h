// The attention of a step's decodes, which goes on slice by slice beside linear layers. Its result is that of attend().
#pragma once
#include <memory>

#include "attention.h"
#include "beside.h"

namespace ISA {

class Decodes final : public Beside {
  public:
    Decodes();
    ~Decodes() override;
    void begin(const Queries& queries);
    Stretches* ahead(int64_t thread) override;
    void go_on(int64_t thread) override;
    // Does what is left of the decodes, and all other attention.
    void end();

  private:
    struct Part;
    struct All;
    std::unique_ptr<All> all;
    void look_ahead(Part& part);
    void attend_slice(Part& part, int64_t tokens);
    void attend_rest(int64_t thread);
};

}  // namespace ISA
